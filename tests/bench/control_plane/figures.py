"""The figures of a load test, its bars and its tables. Pure.

A time is the time that a client sees, on the same busy machine. Memory of a service process is the peak of its resident
set; that of Postgres is the sum of the proportional sets of all its processes, which counts shared memory once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tests.bench.control_plane.stack import POSTGRES, SERVICES, Load

LAG_S: Final = 5.0
RETRIEVE_S: Final = 0.050
SERVICE_MB: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The measurements of one run, in seconds where nothing else is named.

    Attributes:
        lags: the age of the reconciler's heartbeat, sampled every 0.1 s.
        completions: from the last commit of a batch to ``completed``.
        retrievals: ``GET /v1/batches/{id}``.
        syncs: syncs of jobs that do not wait for work.
        commits: commits of jobs.
        loop_lags: by how much timers in the process of the simulated jobs were late.
        live: simulated jobs that ran, sampled every second.
        queued: batches without a lease at the end.
        broken: jobs that ended with an error.
        memory_mb: by process.
        cpu_shares: of one processor, by process.
    """

    lags: Sequence[float]
    completions: Sequence[float]
    retrievals: Sequence[float]
    syncs: Sequence[float]
    commits: Sequence[float]
    loop_lags: Sequence[float]
    live: Sequence[int]
    queued: int
    broken: int
    memory_mb: Mapping[str, float]
    cpu_shares: Mapping[str, float]

    def verdicts(self) -> list[tuple[bool, str]]:
        """Return for each bar whether it was reached, and a line of text."""
        bars = [
            ("lag of the reconciler, p99", quantile(self.lags, 0.99), LAG_S, "s"),
            ("GET /v1/batches/{id}, p99", 1000 * quantile(self.retrievals, 0.99), 1000 * RETRIEVE_S, "ms"),
            *((f"memory of the {name}", self.memory_mb[name], SERVICE_MB, "MB") for name in SERVICES),
        ]
        return [
            (found <= bar, f"{'pass' if found <= bar else 'fail'}: {what}: {found:.1f} {unit} (at most {bar:g} {unit})")
            for what, found, bar, unit in bars
        ]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that so many of the values do not exceed; not a number if there are none."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else float("nan")


def markdown(load: Load, figures: Figures, *, seconds: float, machine: str) -> str:
    """Return the tables.

    Args:
        load: what was asked for.
        figures: what was measured.
        seconds: for how long.
        machine: its processors and its load.
    """
    rows = [
        ("lag of the reconciler, s", figures.lags, 1),
        ("last commit of a batch to `completed`, s", figures.completions, 1),
        ("`GET /v1/batches/{id}`, ms", figures.retrievals, 1000),
        ("sync without waiting, ms", figures.syncs, 1000),
        ("commit, ms", figures.commits, 1000),
        ("timers of the simulated jobs are late by, ms", figures.loop_lags, 1000),
    ]
    description = (
        f"**The jobs are simulated**: tasks of one process that lease and commit as real ones do. `sharing: "
        f"{load.sharing}`, {load.lines} lines in each batch, {load.rows_per_s:g} rows/s and a commit every "
        f"{load.commit_every_s:g} s in each job. Measured for {seconds:.0f} s, in which "
        f"{min(figures.live):,} to {max(figures.live):,} jobs ran and {len(figures.completions):,} batches completed; "
        f"{figures.queued:,} batches waited for their first lease at the end."
    )
    lines = [
        f"### Control plane with {load.live:,} live jobs and {load.queued:,} queued batches ({machine})",
        "",
        description,
        "",
        "| figure | samples | p50 | p99 | most |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, values, factor in rows:
        found = [factor * value for value in (quantile(values, 0.5), quantile(values, 0.99), quantile(values, 1))]
        cells = " | ".join(f"{value:.1f}" if factor > 1 else f"{value:.2f}" for value in found)
        lines.append(f"| {name} | {len(values):,} | {cells} |")
    lines += ["", "| process | memory MB | share of a processor |", "|---|---:|---:|"]
    for name in (*SERVICES, POSTGRES, "jobs"):
        lines.append(f"| {name} | {figures.memory_mb[name]:.0f} | {100 * figures.cpu_shares[name]:.0f} % |")
    return "\n".join(lines) + "\n"
