"""Runs the load test and measures it: ``python -m tests.bench control-plane``."""

import argparse
import contextlib
import itertools
import os
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import psycopg

from service.db import query
from tests.bench.control_plane.figures import Figures, markdown
from tests.bench.control_plane.stack import JOBS, POSTGRES, SERVICES, Load, LoadedStack, fill, running_stack

LAG_INTERVAL_S: Final = 0.1
CLIENTS: Final = 4
CLIENT_PAUSE_S: Final = 0.1
NEW_BATCH_INTERVAL_S: Final = 0.5
RAMP_UP_TIMEOUT_S: Final = 300.0
# Jobs end and are replaced all the time.
ENOUGH_LIVE: Final = 0.97
SETTLE_S: Final = 10.0
SAMPLE: Final = 25
TEN_MINUTES: Final = 200 / 600


def main(arguments: Sequence[str]) -> int:
    """Run one load, print its tables and a line for each bar, and return 1 if a bar was missed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench control-plane", description="The control plane under load, with simulated jobs."
    )
    parser.add_argument("--live", type=int, default=1_000, help="jobs that run at the same time")
    parser.add_argument("--queued", type=int, default=10_000, help="batches that wait for a job")
    parser.add_argument("--seconds", type=float, default=60, help="how long to measure")
    parser.add_argument("--lines", type=int, default=200, help="lines of a batch")
    parser.add_argument(
        "--rows-per-s",
        type=float,
        default=TEN_MINUTES,
        help="the rate of a job of mean length (default: 200 lines in ten minutes; a driver then commits every 10 s)",
    )
    parser.add_argument("--sharing", choices=["batch", "project"], default="batch", help="whose batches share a job")
    parser.add_argument("--keep", action="store_true", help="keep the directory with the logs and the database")
    given = parser.parse_args(arguments)
    load = Load(
        live=given.live, queued=given.queued, lines=given.lines, rows_per_s=given.rows_per_s, sharing=given.sharing
    )
    with memory_directory(keep=given.keep) as directory, running_stack(load, directory) as stack:
        figures = measure(stack, load, seconds=given.seconds)
        problems = lost_or_doubled(stack, load)
    machine = f"{os.cpu_count()} cores, load average {os.getloadavg()[1]:.1f}"
    print(markdown(load, figures, seconds=given.seconds, machine=machine))
    verdicts = figures.verdicts()
    print("\n".join(line for _, line in verdicts))
    print("\n".join(f"fail: {problem}" for problem in problems) or "pass: no line is lost or doubled")
    return 0 if all(passed for passed, _ in verdicts) and not problems else 1


def measure(stack: LoadedStack, load: Load, *, seconds: float, settle_s: float = SETTLE_S) -> Figures:
    """Fill the stack, wait until all jobs run, and measure it.

    Args:
        stack: a new stack.
        load: what it has to carry.
        seconds: how long to measure.
        settle_s: how long to wait once all jobs run.

    Raises:
        RuntimeError: too few jobs ran in time.
    """
    fill(stack, load)
    print(f"{len(stack.batch_ids):,} batches were added; waiting for {load.live:,} jobs", flush=True)
    _ramp_up(stack, load)
    time.sleep(settle_s)
    over = threading.Event()
    lags: list[float] = []
    retrievals: list[float] = []
    live: list[int] = []
    threads = [
        threading.Thread(target=_sample_lags, args=(stack, over, lags)),
        threading.Thread(target=_create_batches, args=(stack, over)),
        *(threading.Thread(target=_retrieve, args=(stack, over, seed, retrievals)) for seed in range(CLIENTS)),
    ]
    names = (*SERVICES, POSTGRES, JOBS)
    processes = {name: stack.processes(name) for name in names}
    [(began_at,)] = stack.sql("SELECT now()")
    httpx.post(f"{stack.dashboard_url}/bench/reset", trust_env=False)
    cpu_before = {each.pid: sum(each.cpu_times()[:2]) for name in names for each in processes[name]}
    began = time.monotonic()
    for thread in threads:
        thread.start()
    while (left_s := began + seconds - time.monotonic()) > 0:
        time.sleep(min(1, left_s))
        live.append(_figures_of_jobs(stack)["running"])
    passed_s = time.monotonic() - began
    over.set()
    for thread in threads:
        thread.join()
    cpu: Counter[str] = Counter()
    memory: Counter[str] = Counter()
    for name in names:
        for each in stack.processes(name):
            # A process of Postgres that has ended meanwhile is left out.
            with contextlib.suppress(OSError):
                cpu[name] += sum(each.cpu_times()[:2]) - cpu_before.get(each.pid, 0)
                memory[name] += each.memory_full_info().pss / 2**20 if name == POSTGRES else _peak_mb(each.pid)
    jobs = _figures_of_jobs(stack)
    completed = stack.sql(
        "SELECT extract(epoch FROM completed_at - last_commit_at)::float FROM batches WHERE completed_at > %s",
        [began_at],
    )
    [(queued,)] = stack.sql("SELECT count(*) FROM batches WHERE status = 'in_progress' AND first_leased_at IS NULL")
    return Figures(
        lags=lags,
        completions=[seconds for (seconds,) in completed],
        retrievals=retrievals,
        syncs=jobs["syncs"],
        commits=jobs["commits"],
        loop_lags=jobs["loop_lags"],
        live=live,
        queued=queued,
        broken=jobs["broken"],
        memory_mb=memory,
        cpu_shares={name: cpu[name] / passed_s for name in names},
    )


def lost_or_doubled(stack: LoadedStack, load: Load) -> list[str]:
    """Return what is wrong with the batches that have ended, and with the files of some of them."""
    problems = [
        f"{count} batches are {status}"
        for status, count in stack.sql(
            "SELECT status, count(*) FROM batches "
            "WHERE status NOT IN ('validating', 'in_progress', 'finalizing', 'completed') GROUP BY status"
        )
    ]
    ended = stack.sql(
        "SELECT batches.id, project_id, output_file_id, completed, failed, total FROM batches "
        "WHERE status = 'completed' ORDER BY random()"
    )
    if not ended:
        return [*problems, "no batch has completed"]
    problems += [
        f"{batch_id} has {completed} results and {failed} errors of {total} lines"
        for batch_id, _, _, completed, failed, total in ended
        if (completed, failed) != (total, 0)
    ]
    keys = {tenant.project_id: tenant.api_key for tenant in stack.tenants}
    expected = Counter(f"id-{number}" for number in range(1, load.lines + 1))
    for batch_id, project_id, file_id, *_ in ended[:SAMPLE]:
        headers = {"authorization": f"Bearer {keys[project_id]}"}
        url = f"{stack.base_url}/files/{file_id}/content"
        lines = httpx.get(url, headers=headers, trust_env=False, timeout=30).text.splitlines()
        found = Counter(httpx.Response(200, text=line).json()["custom_id"] for line in lines)
        if found != expected:
            problems.append(f"{batch_id}: {(expected - found).total()} lost and {(found - expected).total()} doubled")
    return problems


def _ramp_up(stack: LoadedStack, load: Load) -> None:
    deadline, shown = time.monotonic() + RAMP_UP_TIMEOUT_S, 0.0
    while (running := _figures_of_jobs(stack)["running"]) < ENOUGH_LIVE * load.live:
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {running} jobs ran in time; see {stack.layout.logs}")
        if time.monotonic() > shown + 10:
            shown = time.monotonic()
            print(f"{running:,} jobs run", flush=True)
        time.sleep(0.5)


def _sample_lags(stack: LoadedStack, over: threading.Event, lags: list[float]) -> None:
    with psycopg.connect(stack.database_url, autocommit=True) as connection:
        while not over.wait(LAG_INTERVAL_S):
            row = connection.execute(query("heartbeat_age")).fetchone()
            lags.append(row[0] if row else float("inf"))


def _retrieve(stack: LoadedStack, over: threading.Event, seed: int, times: list[float]) -> None:
    """Retrieve queued, running and ended batches, as clients that poll do."""
    chance = random.Random(seed)  # noqa: S311 - the same batches in each run
    copies = len(stack.batch_ids) // len(stack.tenants)
    # The oldest batches of a project run first.
    first = max(1, copies // 10)
    with httpx.Client(trust_env=False, timeout=30) as client:
        while not over.wait(CLIENT_PAUSE_S):
            number = chance.randrange(len(stack.tenants))
            place = chance.randrange(first if chance.random() < 0.5 else copies)
            headers = {"authorization": f"Bearer {stack.tenants[number].api_key}"}
            began = time.monotonic()
            url = f"{stack.base_url}/batches/{stack.batch_ids[number * copies + place]}"
            client.get(url, headers=headers).raise_for_status()
            times.append(time.monotonic() - began)


def _create_batches(stack: LoadedStack, over: threading.Event) -> None:
    """Create batches through the API, which the reconciler validates and plans beside all else."""
    tenants = itertools.cycle(stack.tenants)
    with httpx.Client(trust_env=False, timeout=30) as client:
        while not over.wait(NEW_BATCH_INTERVAL_S):
            tenant = next(tenants)
            request = {
                "input_file_id": tenant.file_id,
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            }
            headers = {"authorization": f"Bearer {tenant.api_key}"}
            client.post(f"{stack.base_url}/batches", headers=headers, json=request).raise_for_status()


def _figures_of_jobs(stack: LoadedStack) -> dict[str, Any]:
    figures: dict[str, Any] = httpx.get(f"{stack.dashboard_url}/bench/figures", trust_env=False, timeout=30).json()
    return figures


def _peak_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


@contextlib.contextmanager
def memory_directory(*, keep: bool = False) -> Iterator[Path]:
    """Create a directory in memory, because disks are not measured, and delete it at the end unless it is kept."""
    shared = Path("/dev/shm")  # noqa: S108 - the kernel's directory
    path = Path(tempfile.mkdtemp(prefix="load-", dir=shared if shared.exists() else None))
    try:
        yield path
    finally:
        if keep:
            print(f"logs and database: {path}", flush=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
