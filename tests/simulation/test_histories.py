"""Many short histories keep the rules; a broken rule is found; the same seed is the same history."""

from collections.abc import Iterator
from concurrent.futures import Executor
from datetime import UTC, datetime

import pytest

from tests.simulation.database import postgres_server
from tests.simulation.histories import Simulator, run_chunks, simulator, worker_processes
from tests.simulation.mutants import MUTANTS, Mutant

pytestmark = pytest.mark.slow

HISTORIES = 10_000
CHUNK = 1_000
PROCESSES = 2
# Seeds that a broken rule is found with, at the latest.
MUTANT_SEEDS = range(2_000)
REPLAYED = (3, 458, 623)


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with worker_processes(PROCESSES) as opened:
        yield opened


@pytest.fixture
def simulated(server_url: str) -> Iterator[Simulator]:
    with simulator(server_url, "simulation_test") as opened:
        opened.stay_on(0)
        yield opened


@pytest.mark.parametrize("first", range(0, HISTORIES, CHUNK))
def test_histories_keep_the_rules(executor: Executor, first: int) -> None:
    failures = [failure for failed, _ in run_chunks(executor, range(first, first + CHUNK)) for failure in failed]
    problems = [f"seed {failure.seed}: {failure.problem}\n    replay: {failure.command}" for failure in failures]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_broken_rule_is_found(simulated: Simulator, mutant: Mutant) -> None:
    with mutant.applied():
        assert any(simulated.run(seed)[0] is not None for seed in MUTANT_SEEDS)


def test_seed_decides_the_history_whatever_ran_before(simulated: Simulator) -> None:
    alone = [simulated.run(seed)[2] for seed in REPLAYED]
    for seed in range(100, 120):
        simulated.run(seed)
    assert [simulated.run(seed)[2] for seed in reversed(REPLAYED)] == alone[::-1]


def test_no_real_time_is_stored(simulated: Simulator) -> None:
    """Histories begin in 2001 and take hours."""
    columns = simulated.look(
        "SELECT table_name, column_name FROM information_schema.columns "
        "WHERE table_schema = 'public' AND data_type LIKE 'timestamp%' "
        "AND table_name IN (SELECT tablename FROM pg_tables WHERE schemaname = 'public') ORDER BY 1, 2"
    )
    stored = 0
    for seed in range(30):
        simulated.run(seed)
        for column in columns:
            table, name = column["table_name"], column["column_name"]
            newest = simulated.look(f"SELECT max({name}) AT TIME ZONE 'UTC' AS newest FROM {table}")[0]["newest"]  # noqa: S608
            if newest is not None:
                stored += 1
                assert newest.replace(tzinfo=UTC) < datetime(2002, 1, 1, tzinfo=UTC), f"{table}.{name}"
    assert stored > len(columns)
