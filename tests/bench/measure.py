"""Measurements of a run.

``total_s``      for scripts, from the start of the process to its end. For cloister, from the creation of the batch to
                 the poll that finds it ``completed``, with Ray and the services new and idle.
``first_row_s``  from the same start to the first moment at which finished rows are visible.
``rows_per_s``   the rows between the 10 % and the 90 % mark, divided by the time between those marks. If all rows of
                 a small file arrive at once, all rows divided by the whole time. For a simulated GPU see ``figures``.
``peak_mb``      the largest sum of proportional set sizes (shared pages count once) of all processes that the run
                 started, sampled once a second.
``cpu_ms_per_row``  the CPU time of the same processes while the device worked, for each row. The start and the end of
                 the processes are left out. Only on a simulated GPU, which takes no CPU time itself.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.bench.figures import DeviceFigures

MARK = "CLOISTER_BENCH_RUN"
SAMPLE_INTERVAL_S = 1.0
STEADY_FROM, STEADY_TO = 0.1, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of one runner."""

    runner: str
    run: int
    case: str
    lines: int
    total_s: float
    first_row_s: float
    rows_per_s: float
    peak_mb: float
    cpu_ms_per_row: float | None = None
    device: DeviceFigures | None = None
    prompt_tokens: int | None = None
    estimated_s: float | None = None
    estimated_prompt_tokens: int | None = None


@dataclass(slots=True, kw_only=True)
class Progress:
    """Finished rows over time, counted from ``start``."""

    lines: int
    start: float = field(default_factory=time.monotonic)
    samples: list[tuple[float, int]] = field(default_factory=list)

    def note(self, rows: int) -> None:
        """Record how many rows are finished now."""
        if not self.samples or rows > self.samples[-1][1]:
            self.samples.append((time.monotonic() - self.start, rows))

    def first_row_s(self) -> float:
        """Return the seconds until finished rows were visible."""
        return next(seconds for seconds, rows in self.samples if rows > 0)

    def rows_per_s(self) -> float:
        """Return the steady rate; see the module's docstring."""
        first = next(sample for sample in self.samples if sample[1] >= STEADY_FROM * self.lines)
        last = next(sample for sample in self.samples if sample[1] >= STEADY_TO * self.lines)
        if last[0] == first[0]:
            return last[1] / last[0]
        return (last[1] - first[1]) / (last[0] - first[0])


@dataclass(slots=True)
class Usage:
    """The largest memory so far in MB, and samples of the CPU seconds used until then."""

    peak_mb: float = 0.0
    cpu_s: list[tuple[float, float]] = field(default_factory=list)


@contextmanager
def watch_processes(token: str) -> Iterator[Usage]:
    """Sample every process whose environment holds ``MARK=token``, and their children."""
    usage, ended = Usage(), threading.Event()
    sampler = threading.Thread(target=_sample, args=(token, usage, ended), daemon=True)
    sampler.start()
    try:
        yield usage
    finally:
        ended.set()
        sampler.join()


def _sample(token: str, usage: Usage, ended: threading.Event) -> None:
    watched: dict[int, bool] = {}
    cpu_s: dict[int, float] = {}
    while not ended.wait(SAMPLE_INTERVAL_S):
        parents = {process.pid: process.info["ppid"] for process in psutil.process_iter(["ppid"])}
        watched = {pid: known for pid, known in watched.items() if pid in parents}
        for pid in sorted(parents):
            if pid not in watched:
                watched[pid] = watched.get(parents[pid], False) or _is_marked(pid, token)
        marked = [pid for pid, known in watched.items() if known]
        cpu_s.update((pid, seconds) for pid in marked if (seconds := _cpu_seconds(pid)))
        # The last sample of an ended process counts on.
        usage.cpu_s.append((time.monotonic(), sum(cpu_s.values())))
        usage.peak_mb = max(usage.peak_mb, sum(map(_proportional_bytes, marked)) / 2**20)


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_marked(pid: int, token: str) -> bool:
    if pid == os.getpid():
        return False
    try:
        return f"{MARK}={token}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _proportional_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
