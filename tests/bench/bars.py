"""The bars: figures that a run of the benchmark must reach. Pure.

A bar that compares two runners divides the medians of their runs. A bar whose figure could not be measured fails.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tests.bench.measure import Result

LEAST_BUSY_SHARE: Final = 0.95
"""Of the engine's limit. If the device waits more, it measures the processors of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything that was measured.

    Attributes:
        results: all runs.
        best_hit_rates: the hit rate of the best order, by case.
        asked_tokens: tokens that all lines of a case ask for, by case.
        assembly_s: seconds of the assembly of 50,000 lines.
    """

    results: Sequence[Result]
    best_hit_rates: Mapping[str, float]
    asked_tokens: Mapping[str, int]
    assembly_s: float | None = None

    def median(self, case: str, runner: str, figure: Callable[[Result], float | None]) -> float:
        """Return the median of a figure over the runs of a runner.

        Raises:
            KeyError: it was not measured.
        """
        runs = [result for result in self.results if (result.case, result.runner) == (case, runner)]
        values = [value for result in runs if (value := figure(result)) is not None]
        if not values:
            raise KeyError(f"{case}: {runner}")
        return statistics.median(values)


Figure = Callable[[Measured], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar.

    Attributes:
        name: what is compared.
        cases: the cases that it needs.
        figure: finds the figure; KeyError if it was not measured.
        bar: the value to reach.
        is_least: whether the figure must be at least the bar; otherwise at most.
        unit: the unit of figure and bar.
    """

    name: str
    cases: tuple[str, ...]
    figure: Figure
    bar: float
    is_least: bool = False
    unit: str = ""

    def verdict(self, measured: Measured) -> tuple[bool, str]:
        """Return whether the bar is reached, and the line that reports it."""
        bar = f"bar {'≥' if self.is_least else '≤'} {self.bar:g}{self.unit}"
        try:
            figure = self.figure(measured)
        except (KeyError, ZeroDivisionError):
            return False, f"fail  {self.name}: not measured ({bar})"
        passed = figure >= self.bar if self.is_least else figure <= self.bar
        return passed, f"{'pass' if passed else 'fail'}  {self.name}: {figure:.3g}{self.unit} ({bar})"


def starved(results: Sequence[Result]) -> list[str]:
    """Return a warning for each run of the engine's limit in which the device waited for the processors."""
    return [
        f"{result.case}, run {result.run}: the device was busy for {100 * result.device.busy_share:.0f} % of the "
        "time at the engine's limit. It waited for the processors: repeat on an idle machine, or with --clock-rate 0.5"
        for result in results
        if result.runner == "limit" and result.device and result.device.busy_share < LEAST_BUSY_SHARE
    ]


def device_rate(result: Result) -> float | None:
    """Return rows per second of the device's clock. Rows that ran once for several lines count for each line."""
    return result.lines / result.device.seconds if result.device else None


def total(result: Result) -> float:
    """Return the seconds of the whole run."""
    return result.total_s


def first_row(result: Result) -> float:
    """Return the seconds to the first row."""
    return result.first_row_s


def hit_rate(result: Result) -> float | None:
    """Return the hit rate of the prefix cache."""
    return result.device.hit_rate if result.device else None


def generated_tokens(result: Result) -> float | None:
    """Return the tokens that the device generated."""
    return result.device.generated_tokens if result.device else None


def busy_share_95(result: Result) -> float | None:
    """Return the busy share of the devices until 95 % of the rows were finished."""
    return result.device.busy_share_95 if result.device else None


def ratio(case: str, runner: str, other: str, figure: Callable[[Result], float | None]) -> Figure:
    """Return the figure of a runner divided by that of another one."""
    return lambda measured: measured.median(case, runner, figure) / measured.median(case, other, figure)


def hits_of_best(case: str) -> Figure:
    """Return cloister's hit rate divided by that of the best order."""
    return lambda measured: measured.median(case, "cloister", hit_rate) / measured.best_hit_rates[case]


def generated_share(case: str) -> Figure:
    """Return the tokens that cloister generated divided by those that the lines ask for."""
    return lambda measured: measured.median(case, "cloister", generated_tokens) / measured.asked_tokens[case]


def assembly(measured: Measured) -> float:
    """Return the seconds of the assembly."""
    if measured.assembly_s is None:
        raise KeyError("assembly")
    return measured.assembly_s


def estimate_error(
    case: str, estimated: Callable[[Result], float | None], real: Callable[[Result], float | None]
) -> Figure:
    """Return how far cloister's estimate was from the real figure, as a part of it."""
    return lambda measured: abs(
        measured.median(case, "cloister", estimated) / measured.median(case, "cloister", real) - 1
    )


BARS: Final = (
    *(
        Bar(
            name=f"lognormal lengths, {gpu} 8B: rows/s by the device's clock against the engine's limit",
            cases=(f"lognormal-{gpu.lower()}",),
            figure=ratio(f"lognormal-{gpu.lower()}", "cloister", "limit", device_rate),
            bar=0.97,
            is_least=True,
        )
        for gpu in ("H100", "A10G", "V100")
    ),
    *(
        Bar(
            name=f"lognormal lengths, {gpu} 8B: whole cold run against run_batch",
            cases=(f"lognormal-{gpu.lower()}",),
            figure=ratio(f"lognormal-{gpu.lower()}", "cloister", "run_batch", total),
            bar=1.0,
        )
        for gpu in ("H100", "A10G", "V100")
    ),
    Bar(
        name="system prompts with differing last lines, A10G: whole cold run against run_batch",
        cases=("prefix-a10g",),
        figure=ratio("prefix-a10g", "cloister", "run_batch", total),
        bar=0.4,
    ),
    Bar(
        name="the same: hit rate against the best order",
        cases=("prefix-a10g",),
        figure=hits_of_best("prefix-a10g"),
        bar=0.95,
        is_least=True,
    ),
    Bar(
        name="the same on 4 engines: hit rate against the best order",
        cases=("prefix-a10g-4-engines",),
        figure=hits_of_best("prefix-a10g-4-engines"),
        bar=0.90,
        is_least=True,
    ),
    Bar(
        name="4,000 lines, demo model on this machine: total against run_batch",
        cases=("fixed-demo",),
        figure=ratio("fixed-demo", "cloister", "run_batch", total),
        bar=0.8,
    ),
    Bar(
        name="4,000 lines, demo model on this machine: total against stock ray.data.llm",
        cases=("fixed-demo",),
        figure=ratio("fixed-demo", "cloister", "stock", total),
        bar=0.6,
    ),
    Bar(
        name="demo model: first row of a cold batch against the first answer of vLLM's API server",
        cases=("start-demo",),
        figure=ratio("start-demo", "cloister", "http", first_row),
        bar=0.7,
    ),
    Bar(
        name="10 % duplicates: generated tokens against tokens asked for",
        cases=("duplicates-h100",),
        figure=generated_share("duplicates-h100"),
        bar=0.91,
    ),
    Bar(
        name="a poisoned row among 2,000: total against the same file without it",
        cases=("clean-h100", "poisoned-h100"),
        figure=lambda measured: (
            measured.median("poisoned-h100", "cloister", total) / measured.median("clean-h100", "cloister", total)
        ),
        bar=1.25,
    ),
    Bar(
        name="4 engines, lognormal lengths: busy share until 95 % of the rows are finished",
        cases=("lognormal-h100-4-engines",),
        figure=lambda measured: measured.median("lognormal-h100-4-engines", "cloister", busy_share_95),
        bar=0.95,
        is_least=True,
    ),
    Bar(
        name="assembly of 50,000 lines with 20 ms for each request to the store",
        cases=(),
        figure=assembly,
        bar=5.0,
        unit=" s",
    ),
    Bar(
        name="estimated duration of a warm batch: error against the real one",
        cases=("estimate-h100",),
        figure=estimate_error("estimate-h100", lambda result: result.estimated_s, total),
        bar=0.10,
    ),
    Bar(
        name="estimated prompt tokens: error against the real ones",
        cases=("estimate-h100",),
        figure=estimate_error(
            "estimate-h100", lambda result: result.estimated_prompt_tokens, lambda result: result.prompt_tokens
        ),
        bar=0.0,
    ),
)
