"""Leases of the coordinator on real Postgres: given, extended, lost, shared fairly, ended."""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from ray_job.contract.leases import Lease
from ray_job.contract.object_keys import prompt_rules_key
from service.adapters.memory_object_store import MemoryObjectStore
from service.coordinator.errors import JobEndedError
from service.coordinator.leasing import BACKLOG_SEGMENTS, LEASE_S, MAX_LEASES, TURN_SEGMENTS, TURN_TOKENS
from service.db import Pool, query
from service.errors import ObjectStoreError
from tests.conftest import as_owner
from tests.integration.coordinator_harness import MODEL, ROWS, STOPPED, TOKENS, Coordinated, FakeJob


@pytest.fixture
def stack(pool: Pool) -> Coordinated:
    return Coordinated(pool)


def test_lease_describes_its_segment(stack: Coordinated) -> None:
    stack.add(tokens=(500, 700))
    job = stack.start_job()
    first, second = job.lease()
    assert (first.batch_id, first.segment, first.epoch, first.endpoint) == ("b", 0, 1, "/v1/chat/completions")
    assert (first.start, first.end, first.rows, first.tokens, first.done) == (0, 100, ROWS, 500, "0")
    assert first.url == "memory:///batches/b/plan"
    assert (second.segment, second.start, second.end, second.tokens) == (1, 100, 200, 700)


def test_lease_of_a_committed_segment_names_its_done_rows(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    (lease,) = job.lease()
    assert job.commit(lease, rows=[0, 2])
    stack.expire_leases()
    (again,) = job.lease()
    assert (again.done, again.epoch) == ("5", 2)


def test_projects_of_a_shared_domain_have_their_own_cache_salts(stack: Coordinated) -> None:
    stack.add("a", project="p")
    stack.add("b", project="q")
    stack.add("c", project="p")
    stack.add("own", project="p", domain="p")
    salts = {lease.batch_id: lease.cache_salt for lease in stack.start_job().lease()}
    assert salts["a"] == salts["c"] != salts["b"]
    assert "" not in salts.values()
    assert [lease.cache_salt for lease in stack.start_job("p").lease()] == [""]


def test_no_segment_is_leased_twice(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 3)
    job = stack.start_job()
    assert len(job.lease()) == 3
    assert job.lease() == ()


def test_job_gets_about_the_tokens_that_it_wants(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 10)
    stack.add("other", project="q", tokens=[TOKENS] * 10)
    job = stack.start_job()
    assert [len(job.lease(wanted)) for wanted in (0, 1, 2 * TOKENS, 4 * TOKENS)] == [0, 1, 2, 4]


def test_first_segment_is_leased_although_it_is_larger_than_what_is_wanted(stack: Coordinated) -> None:
    stack.add(tokens=[10 * TURN_TOKENS, TOKENS])
    assert stack.start_job().leased(1) == [("b", 0)]


def test_one_call_gives_a_limited_number_of_leases(stack: Coordinated) -> None:
    stack.add(tokens=[1] * (MAX_LEASES + 5))
    job = stack.start_job()
    assert [len(job.lease()), len(job.lease())] == [MAX_LEASES, 5]


def test_job_leases_only_in_its_domain_and_of_its_model(stack: Coordinated) -> None:
    stack.add("mine", domain="p")
    stack.add("other", domain="q", project="q")
    stack.add("model", domain="p")
    stack.change("model", "model = 'another'")
    assert [lease.batch_id for lease in stack.start_job("p").lease()] == ["mine"]


def test_held_lease_is_extended(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    (lease,) = job.lease()
    stack.sql("UPDATE segments SET leased_until = now() + interval '1 s'")
    assert job.lost(lease) == ()
    assert stack.sql("SELECT leased_until - now() > interval '55 s' AS extended FROM segments")[0]["extended"]


def test_lease_that_is_not_held_expires(stack: Coordinated) -> None:
    stack.add()
    first = stack.start_job()
    (old,) = first.lease()
    stack.expire_leases()
    second = stack.start_job()
    (new,) = second.lease()
    assert new.epoch == old.epoch + 1
    assert first.lost(old) == (old.ref,)
    assert second.lost(new) == ()


def test_expired_lease_that_nobody_took_is_extended(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    (lease,) = job.lease()
    stack.expire_leases()
    assert job.lost(lease) == ()
    assert job.lease() == ()


def test_segment_that_the_job_has_done_is_not_lost(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 2)
    job = stack.start_job()
    leases = job.lease()
    job.commit(leases[0])
    assert job.lost(*leases) == ()


def test_lease_of_another_job_or_of_an_unknown_batch_is_lost(stack: Coordinated) -> None:
    stack.add()
    (lease,) = stack.start_job().lease()
    other = stack.start_job()
    assert other.lost(lease) == (lease.ref,)
    stack.sql("DELETE FROM segments")
    assert other.lost(lease) == (lease.ref,)


@pytest.mark.parametrize("columns", STOPPED.values(), ids=list(STOPPED))
def test_stopped_batch_is_lost_and_not_leased(stack: Coordinated, columns: str) -> None:
    stack.add("stopped", tokens=[TOKENS] * 2)
    stack.add("other")
    job = stack.start_job()
    held = job.lease(2 * TOKENS)
    stack.add("later")
    stack.change("stopped", columns)
    answer = job.sync(held=[lease.ref for lease in held])
    assert set(answer.lost) == {lease.ref for lease in held if lease.batch_id == "stopped"} != set()
    assert {lease.batch_id for lease in (*held, *answer.leases)} == {"stopped", "other", "later"}
    assert {lease.batch_id for lease in answer.leases} == {"other", "later"}
    assert job.sync(0).backlog_tokens == 0


def test_resumed_batch_is_leased_again(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    (lease,) = job.lease()
    stack.change("b", "paused_at = now()")
    assert job.lost(lease) == (lease.ref,)
    stack.change("b", "paused_at = NULL")
    (again,) = job.lease()
    assert again.epoch == 2


def test_draining_job_keeps_its_leases_and_gets_no_more(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 2)
    job = stack.start_job()
    (lease,) = job.lease(1)
    stack.sql("UPDATE jobs SET draining_at = now()")
    answer = job.sync(held=[lease.ref])
    assert (answer.leases, answer.lost, answer.drain, answer.backlog_tokens) == ((), (), True, 0)
    assert job.commit(lease)


def test_backlog_counts_what_can_be_leased(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 5)
    job = stack.start_job()
    assert job.sync(2 * TOKENS).backlog_tokens == 3 * TOKENS


def test_job_is_idle_while_it_holds_no_lease(stack: Coordinated) -> None:
    def is_idle() -> bool:
        return bool(stack.sql("SELECT idle_since IS NOT NULL AS idle FROM jobs")[0]["idle"])

    job = stack.start_job()
    job.sync()
    assert is_idle()
    stack.add(tokens=[TOKENS] * 2)
    leases = job.lease()
    assert not is_idle()
    job.commit(leases[0])
    assert not is_idle()
    job.commit(leases[1])
    assert is_idle()


def test_sync_records_engines_and_the_first_lease_of_a_batch(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 2)
    job = stack.start_job()
    job.sync(1, engines=3)
    job.sync(1, engines=4)
    (row,) = stack.sql("SELECT engines, seen_at IS NOT NULL AS seen FROM jobs")
    assert (row["engines"], row["seen"]) == (4, True)
    assert stack.batch()["first_leased_at"] is not None
    events = stack.sql("SELECT type, data FROM batch_events WHERE type = 'job.running'")
    assert [event["data"] for event in events] == [{"job_id": job.id}]


def test_prompt_rules_are_asked_for_while_they_are_unknown(stack: Coordinated) -> None:
    job = stack.start_job(model_key="new-model")
    assert job.sync().prompt_rules_url == f"memory:///jobs/{job.id}/prompt_rules.json"
    stack.store.put(prompt_rules_key("new-model"), [b"{}"])
    assert job.sync().prompt_rules_url == ""


def test_leases_are_delivered_although_the_object_store_is_away(pool: Pool) -> None:
    class Away(MemoryObjectStore):
        def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
            raise ObjectStoreError(f"cannot read {key} from {start}")

    stack = Coordinated(pool, Away())
    stack.add()
    answer = stack.start_job(model_key="unreadable-model").sync()
    assert (len(answer.leases), answer.prompt_rules_url) == (1, "")


# Order within a project


def test_batches_at_risk_come_first_then_priority_then_age(stack: Coordinated) -> None:
    stack.add("old")
    stack.add("new")
    stack.add("urgent", priority=5)
    stack.add("later risk", expires_in_s=110)
    stack.add("first risk", expires_in_s=100, priority=-1)
    job = stack.start_job()
    order = [job.leased()[0][0] for _ in range(5)]
    assert order == ["first risk", "later risk", "urgent", "old", "new"]


def test_batch_without_estimate_is_at_risk_half_an_hour_before_its_deadline(stack: Coordinated) -> None:
    stack.add("plenty", expires_in_s=1_900)
    stack.add("late", expires_in_s=1_700)
    stack.sql("UPDATE batches SET estimate = NULL")
    assert stack.start_job().leased() == [("late", 0)]


def test_segments_of_a_batch_are_leased_in_order(stack: Coordinated) -> None:
    stack.add("a", tokens=[TOKENS] * 3)
    stack.add("b", tokens=[TOKENS] * 2)
    assert stack.start_job().leased(10**9) == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]


# Fairness between projects


def shares(stack: Coordinated, job: FakeJob, until_tokens: int, wanted: int) -> Counter[str]:
    """Lease until so many tokens are leased; return them by project."""
    leases: list[Lease] = []
    while sum(lease.tokens for lease in leases) < until_tokens:
        new = job.lease(wanted)
        assert new
        leases += new
    return stack.tokens_by_project(leases)


@pytest.mark.parametrize("wanted", [1, 40_000, 500_000])
@pytest.mark.parametrize("projects", [["p", "q"], ["p", "q", "r"]])
def test_projects_get_equal_shares_of_tokens(stack: Coordinated, projects: list[str], wanted: int) -> None:
    generator = random.Random(7)  # noqa: S311 - sizes of segments
    for number, project in enumerate(projects):
        # Segments of one project are several times as large as those of the next.
        most = 64_000 // 4**number
        for batch in range(3):
            tokens = [generator.randint(most // 2, most) for _ in range(70 * 4**number)]
            stack.add(f"{project}{batch}", project=project, tokens=tokens)
    by_project = shares(stack, stack.start_job(), 2_400_000 * len(projects), wanted)
    mean = by_project.total() / len(projects)
    assert set(by_project) == set(projects)
    assert all(abs(tokens - mean) < mean / 10 for tokens in by_project.values())


def test_project_that_joins_late_gets_no_credit_for_the_past(stack: Coordinated) -> None:
    stack.add("early", project="p", tokens=[50_000] * 100)
    job = stack.start_job()
    shares(stack, job, 2_000_000, 1)
    stack.add("late", project="q", tokens=[50_000] * 100)
    by_project = shares(stack, job, 2_000_000, 1)
    assert abs(by_project["p"] - by_project["q"]) <= 100_000


def test_project_that_had_no_work_for_a_while_gets_no_credit_for_it(stack: Coordinated) -> None:
    stack.add("p", project="p", tokens=[50_000] * 150)
    stack.add("q1", project="q", tokens=[50_000] * 5)
    job = stack.start_job()
    shares(stack, job, 3_000_000, 1)
    stack.add("q2", project="q", tokens=[50_000] * 100)
    by_project = shares(stack, job, 2_000_000, 1)
    assert abs(by_project["p"] - by_project["q"]) <= 100_000


def test_share_of_a_project_does_not_depend_on_its_number_of_batches(stack: Coordinated) -> None:
    stack.add_many([f"p{number}" for number in range(50)], project="p", tokens=[10_000] * 3)
    stack.add("q", project="q", tokens=[10_000] * 150)
    by_project = shares(stack, stack.start_job(), 2_000_000, 1)
    assert by_project["p"] == pytest.approx(by_project["q"], rel=0.1)


def test_fairness_outlives_the_job(stack: Coordinated) -> None:
    stack.add("p", project="p", tokens=[50_000] * 40)
    stack.add("q", project="q", tokens=[50_000] * 40)
    leases = [lease for _ in range(20) for lease in stack.start_job().lease(1)]
    assert stack.tokens_by_project(leases) == {"p": 500_000, "q": 500_000}


# The end of a job


def test_job_without_work_ends_and_its_token_is_void(stack: Coordinated) -> None:
    job = stack.start_job()
    assert job.end()
    (row,) = stack.sql("SELECT * FROM jobs")
    assert row["ended_at"] is not None
    assert (row["engine_s"], row["busy_s"], row["engines"], row["reason"]) == (2.5, 1.5, 0, None)
    with pytest.raises(JobEndedError):
        job.sync()
    with pytest.raises(JobEndedError):
        job.end()


def test_job_with_work_does_not_end(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    assert not job.end()
    assert job.leased() == [("b", 0)]


def test_job_with_a_lease_does_not_end(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    (lease,) = job.lease()
    assert not job.end()
    assert job.commit(lease)
    assert job.end()


def test_leases_of_another_job_are_no_work(stack: Coordinated) -> None:
    stack.add()
    first = stack.start_job()
    first.lease()
    assert stack.start_job().end()


@pytest.mark.parametrize("columns", STOPPED.values(), ids=list(STOPPED))
def test_job_that_holds_a_lease_of_a_stopped_batch_ends(stack: Coordinated, columns: str) -> None:
    stack.add()
    job = stack.start_job()
    job.lease()
    stack.change("b", columns)
    assert job.end()


@pytest.mark.parametrize("columns", STOPPED.values(), ids=list(STOPPED))
def test_stopped_batch_is_no_work(stack: Coordinated, columns: str) -> None:
    stack.add()
    stack.change("b", columns)
    assert stack.start_job().end()


def test_draining_job_ends_although_there_is_work_and_releases_its_leases(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 2)
    job = stack.start_job()
    job.lease(1)
    stack.sql("UPDATE jobs SET draining_at = now()")
    assert job.end()
    assert [row["job_id"] for row in stack.sql("SELECT job_id FROM segments")] == [None, None]
    assert len(stack.start_job().lease()) == 2


def test_end_waits_for_a_lease_in_progress(stack: Coordinated) -> None:
    job = stack.start_job()
    stack.add()
    with ThreadPoolExecutor(1) as executor, stack.pool.connection() as leasing:
        leasing.execute(query("lock_domain_of_job"), {"job_id": job.id})
        ending = executor.submit(job.end)
        time.sleep(0.2)
        assert not ending.done()
        leasing.commit()
        assert ending.result(timeout=5) is False


def test_job_that_ended_while_its_sync_waited_gets_no_lease(stack: Coordinated) -> None:
    job = stack.start_job()
    stack.add()
    with ThreadPoolExecutor(1) as executor, stack.pool.connection() as ending:
        ending.execute(query("lock_domain_of_job"), {"job_id": job.id})
        syncing = executor.submit(job.sync)
        time.sleep(0.2)
        assert not syncing.done()
        ending.execute("UPDATE jobs SET ended_at = now(), draining_at = now()")
        ending.commit()
        with pytest.raises(JobEndedError):
            syncing.result(timeout=5)
    assert stack.segment()["job_id"] is None


def test_end_against_new_work_leaves_no_job_behind_with_work(stack: Coordinated) -> None:
    """Either the job goes on with the new batch, or its domain has no job, so that the reconciler creates one."""
    for number in range(20):
        job = stack.start_job()
        start = threading.Barrier(2)

        def end(job: FakeJob = job, start: threading.Barrier = start) -> bool:
            start.wait()
            return job.end()

        def add(number: int = number, start: threading.Barrier = start) -> None:
            start.wait()
            stack.add_many([f"b{number}"])

        with ThreadPoolExecutor(2) as executor:
            ending, adding = executor.submit(end), executor.submit(add)
            adding.result()
            has_ended = ending.result()
        with stack.pool.connection() as connection:
            rows = connection.execute(query("domains_without_job"), {"limit": 1}).fetchall()
        assert bool(rows) == has_ended
        successor = stack.start_job() if has_ended else job
        (lease,) = successor.lease()
        assert successor.commit(lease)


def test_extension_and_end_by_the_reconciler_do_not_block_each_other(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 200)
    job = stack.start_job()
    held = job.lease()

    def extend() -> None:
        for _ in range(30):
            try:
                job.lost(*held)
            except JobEndedError:
                return

    def end() -> None:
        for _ in range(30):
            with stack.pool.connection() as connection:
                values = {"job_id": job.id, "now": "now", "reason": None, "is_gone": False}
                for name in ("lock_domain_of_job", "release_leases", "end_job"):
                    connection.execute(query(name), values)
            stack.sql("UPDATE jobs SET ended_at = NULL")
            # In the same order as everything else that changes several segments.
            stack.sql(
                "WITH locked AS (SELECT FROM segments ORDER BY batch_id, number FOR UPDATE) "
                "UPDATE segments SET job_id = %s WHERE (SELECT count(*) FROM locked) > 0",
                job.id,
            )

    with ThreadPoolExecutor(2) as executor:
        extending, ending = executor.submit(extend), executor.submit(end)
        extending.result()
        ending.result()


# Scale


def test_two_threads_lease_each_of_many_segments_once(stack: Coordinated) -> None:
    stack.add_many([f"b{number}" for number in range(1_000)], tokens=[TOKENS] * 3)
    job = stack.start_job()

    def lease_all() -> list[Lease]:
        leases: list[Lease] = []
        while new := job.lease(20 * TOKENS):
            leases += new
        return leases

    with ThreadPoolExecutor(2) as executor:
        threads = [executor.submit(lease_all) for _ in range(2)]
        leases = [lease for thread in threads for lease in thread.result()]
    assert len({lease.ref for lease in leases}) == len(leases) == 3_000
    assert {lease.epoch for lease in leases} == {1}


def most_rows(node: dict[str, Any]) -> float:
    """Return the most rows that a node of a query's plan has read."""
    rows: float = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
    return max([rows, *(most_rows(child) for child in node.get("Plans", []))])


@pytest.mark.parametrize("is_at_risk", [False, True])
def test_lease_call_does_not_grow_with_the_queue(stack: Coordinated, *, is_at_risk: bool) -> None:
    stack.add_many([f"b{number}" for number in range(10_000)])
    if is_at_risk:
        stack.sql("UPDATE batches SET expires_at = now() + interval '100 s'")
    with psycopg.connect(as_owner(stack.pool)) as owner:
        owner.execute("ANALYZE")
    job = stack.start_job()
    values = {
        "model": MODEL,
        "domain": "stack",
        "virtual_time": 0.0,
        "project_id": "p",
        "job_id": job.id,
        "tokens": TOKENS,
        "lease_s": LEASE_S,
    }
    limits = {"projects_to_lease": MAX_LEASES, "lease_turn": TURN_SEGMENTS, "backlog_tokens": BACKLOG_SEGMENTS}
    for name, limit in limits.items():
        with stack.pool.connection() as connection:
            text = psycopg.ClientCursor(connection).mogrify(query(name), {**values, "limit": limit})
            (plan,) = connection.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {text}").fetchall()
        assert most_rows(plan["QUERY PLAN"][0]["Plan"]) <= 1_100, name


@pytest.mark.slow
def test_lease_call_takes_less_than_30_ms_with_a_long_queue(stack: Coordinated) -> None:
    stack.add_many([f"b{number}" for number in range(10_000)])
    job = stack.start_job()
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        assert len(job.lease(TOKENS)) == 1
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.030  # the others may have waited for a processor
