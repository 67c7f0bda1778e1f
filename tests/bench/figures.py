"""The figures of a run: those of its processes and, on a simulated GPU, those by the clock of the device. Pure.

``rows_per_s``  all rows divided by the device's time from the start of the first step to the end of the last one, tail
                included. A rate between the 10 % and the 90 % mark would show 67 rows/s where the whole run has 42,
                because the longest rows are left to the end.
``rows_per_busy_s``  the same divided by the time in which the devices computed: what is left if processors that are too
                slow for the device make it wait. It shows how full the steps were.
``busy_share``  the part of that time in which the device computed; with several devices, of all their time.
``busy_share_95``  the same until 95 % of the rows were finished.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tests.bench.simulated_gpu.device_report import DeviceReport

MOST_ROWS: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """The work of all simulated devices of a run, in seconds of their clock."""

    reports: int
    finished_rows: int
    seconds: float
    rows_per_s: float
    rows_per_busy_s: float
    tokens_per_s: float
    running: float
    busy_share: float
    busy_share_95: float
    hit_rate: float
    prompt_tokens: int
    generated_tokens: int
    preemptions: int


def device_figures(reports: Sequence[DeviceReport], *, engines: int = 1) -> DeviceFigures:
    """Return the figures of the devices of one run.

    Args:
        reports: those of all processes that had a device. An engine that is restarted writes another one.
        engines: engines that the run had at the same time. One that got no work writes no report, and is idle.
    """
    starts_at = min(report.first_step_at for report in reports)
    ends_at = max(report.last_step_ends_at for report in reports)
    clock_rate = reports[0].clock_rate
    seconds = (ends_at - starts_at) * clock_rate
    rows = sum(report.finished_rows for report in reports)
    tokens = sum(report.generated_tokens for report in reports)
    prompt_tokens = sum(report.prompt_tokens for report in reports)
    most_at = _time_of(reports, MOST_ROWS * rows)
    return DeviceFigures(
        reports=len(reports),
        finished_rows=rows,
        seconds=seconds,
        rows_per_s=rows / seconds,
        rows_per_busy_s=rows / (sum(report.busy_s for report in reports) * clock_rate),
        tokens_per_s=tokens / seconds,
        running=sum(report.running_s for report in reports) / (ends_at - starts_at),
        busy_share=sum(report.busy_s for report in reports) / (ends_at - starts_at) / engines,
        busy_share_95=_busy_until(reports, most_at) / max(1e-9, most_at - starts_at) / engines,
        hit_rate=sum(report.hit_tokens for report in reports) / prompt_tokens if prompt_tokens else 0.0,
        prompt_tokens=prompt_tokens,
        generated_tokens=tokens,
        preemptions=sum(report.preemptions for report in reports),
    )


def _time_of(reports: Sequence[DeviceReport], rows: float) -> float:
    """Return the time at which so many rows were finished on all devices."""
    finished = 0
    steps = []
    for report in reports:
        before = 0
        for at, count, _ in report.progress:
            steps.append((at, count - before))
            before = count
    for at, count in sorted(steps):
        finished += count
        if finished >= rows:
            return at
    return max(report.last_step_ends_at for report in reports)


def _busy_until(reports: Iterable[DeviceReport], at: float) -> float:
    return sum(max((busy_s for time, _, busy_s in report.progress if time <= at), default=0.0) for report in reports)


def between(samples: Sequence[tuple[float, float]], starts_at: float, ends_at: float) -> float:
    """Return how much a growing counter grew between two times, interpolated between its samples.

    Args:
        samples: pairs of time and value, by time.
        starts_at: the earlier time.
        ends_at: the later time.
    """
    return _value_at(samples, ends_at) - _value_at(samples, starts_at)


def _value_at(samples: Sequence[tuple[float, float]], at: float) -> float:
    earlier = (0.0, 0.0)
    for time, value in samples:
        if time >= at:
            if earlier[0] == 0.0 or time == earlier[0]:
                return value
            return earlier[1] + (value - earlier[1]) * (at - earlier[0]) / (time - earlier[0])
        earlier = (time, value)
    return earlier[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and range of a figure over several runs."""

    median: float
    least: float
    most: float

    def text(self, digits: int = 1) -> str:
        """Format as ``39.0``, or as ``39.0 (38.7 to 39.2)`` where runs differ."""
        median, least, most = (f"{value:,.{digits}f}" for value in (self.median, self.least, self.most))
        return median if least == most else f"{median} ({least} to {most})"


def spread(values: Iterable[float]) -> Spread:
    """Return median and range."""
    ordered = sorted(values)
    return Spread(median=statistics.median(ordered), least=ordered[0], most=ordered[-1])


def block_hits(
    prompts: Iterable[Sequence[int]],
    *,
    block_size: int,
    hash_block: Callable[[int, tuple[int, ...]], int] | None = None,
) -> float:
    """Return the hit rate of the prefix cache in the best order: every block is computed once.

    Args:
        prompts: the tokens of each prompt.
        block_size: tokens of one block of the KV cache.
        hash_block: hashes a block with the hash of the block before it.
    """
    chain = hash_block or (lambda before, block: hash((before, block)))
    seen: set[int] = set()
    total = hits = 0
    for prompt in prompts:
        total += len(prompt)
        before = 0
        # vLLM computes at least the last token of a prompt, so a block that ends with it is no hit.
        for start in range(0, len(prompt) - block_size, block_size):
            before = chain(before, tuple(prompt[start : start + block_size]))
            if before in seen:
                hits += block_size
            seen.add(before)
    return hits / total if total else 0.0
