"""What is measured of a run, and how.

``total_s``      for scripts: from the start of their process to its end; for cloister: from the creation of
                 the batch to the poll that finds it ``completed``, Ray and the services being new and idle.
``first_row_s``  from the same start to the first moment that finished rows are seen.
``rows_per_s``   the rows between the 10 % and the 90 % mark, over the time between those marks; over the
                 whole time where a file is so small that all rows come at once.
``peak_mb``      the largest sum of proportional set sizes (shared pages count once) over all processes that
                 the run started, sampled once a second.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MARK = "CLOISTER_BENCH_RUN"
MEMORY_INTERVAL_S = 1.0
STEADY_FROM, STEADY_TO = 0.1, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of one runner."""

    runner: str
    run: int
    total_s: float
    first_row_s: float
    rows_per_s: float
    peak_mb: float


@dataclass(slots=True, kw_only=True)
class Progress:
    """Finished rows over time, counted from ``start``."""

    lines: int
    start: float = field(default_factory=time.monotonic)
    samples: list[tuple[float, int]] = field(default_factory=list)

    def note(self, rows: int) -> None:
        """Takes down how many rows are finished now."""
        if not self.samples or rows > self.samples[-1][1]:
            self.samples.append((time.monotonic() - self.start, rows))

    def first_row_s(self) -> float:
        """Seconds until rows were seen."""
        return next(seconds for seconds, rows in self.samples if rows > 0)

    def rows_per_s(self) -> float:
        """The steady rate; see the module's docstring."""
        first = next(sample for sample in self.samples if sample[1] >= STEADY_FROM * self.lines)
        last = next(sample for sample in self.samples if sample[1] >= STEADY_TO * self.lines)
        if last[0] == first[0]:
            return last[1] / last[0]
        return (last[1] - first[1]) / (last[0] - first[0])


@dataclass(slots=True)
class PeakMemory:
    """The largest memory seen so far, in MB."""

    peak_mb: float = 0.0


@contextmanager
def watch_memory(token: str) -> Iterator[PeakMemory]:
    """Samples every process whose environment holds ``MARK=token``, and their children."""
    peak, ended = PeakMemory(), threading.Event()
    sampler = threading.Thread(target=_sample, args=(token, peak, ended), daemon=True)
    sampler.start()
    try:
        yield peak
    finally:
        ended.set()
        sampler.join()


def _sample(token: str, peak: PeakMemory, ended: threading.Event) -> None:
    ours: dict[int, bool] = {}
    while not ended.wait(MEMORY_INTERVAL_S):
        parents = {process.pid: process.info["ppid"] for process in psutil.process_iter(["ppid"])}
        ours = {pid: known for pid, known in ours.items() if pid in parents}
        for pid in sorted(parents):
            if pid not in ours:
                ours[pid] = ours.get(parents[pid], False) or _is_marked(pid, token)
        total = sum(_proportional_bytes(pid) for pid, known in ours.items() if known)
        peak.peak_mb = max(peak.peak_mb, total / 2**20)


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
