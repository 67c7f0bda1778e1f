"""Results of a run, as a table for the terminal, Markdown and JSON."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Final, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tests.conformance.contract import AREAS, POINTS

Outcome = Literal["holds", "does not hold", "not checked"]
_MARKS: Final[dict[Outcome, str]] = {"holds": "✓", "does not hold": "✗", "not checked": "-"}
_COLOURS: Final[dict[Outcome, str]] = {"holds": "green", "does not hold": "red", "not checked": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of a server.

    Attributes:
        area: group in the table.
        sentence: statement that should hold.
        point: point of the contract that the check cites, a key of ``POINTS``.
        outcome: result of the check.
        expected: what the contract requires, if the check does not hold.
        seen: what the server returned instead; for a check that did not run, the reason.
    """

    area: str
    sentence: str
    point: str
    outcome: Outcome
    expected: str = ""
    seen: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All checks of one run against ``base_url``, and its duration in seconds."""

    base_url: str
    model: str
    duration_s: float
    checks: tuple[Check, ...]

    def of(self, area: str) -> list[Check]:
        """Return the checks of one area."""
        return [check for check in self.checks if check.area == area]

    def count(self, outcome: Outcome, area: str | None = None) -> int:
        """Count the checks with this outcome, in one area or in all."""
        return sum(check.outcome == outcome for check in (self.checks if area is None else self.of(area)))

    @property
    def areas(self) -> list[str]:
        """Areas with checks, in the order of the table."""
        return [area for area in AREAS.values() if self.of(area)]

    @property
    def all_hold(self) -> bool:
        """True if at least one check holds and none failed."""
        return self.count("holds") > 0 and self.count("does not hold") == 0

    def summary(self) -> str:
        """Return the counts in one sentence."""
        parts = [f"{self.count('holds')} of {len(self.checks)} checks hold"]
        if self.count("does not hold"):
            parts.append(f"{self.count('does not hold')} do not")
        if self.count("not checked"):
            parts.append(f"{self.count('not checked')} could not run")
        return f"{', '.join(parts)} ({self.duration_s:.0f} s, {self.base_url}, model {self.model})"


def to_json(report: Report) -> str:
    """Return the report as JSON, with the text of the points."""
    return json.dumps(dataclasses.asdict(report) | {"points": POINTS}, ensure_ascii=False, indent=1) + "\n"


def to_table(report: Report) -> RenderableType:
    """Return one table per area with one line per check, and both values of each check that does not hold."""
    tables: list[RenderableType] = [_area_table(report, area) for area in report.areas]
    return Group(*tables, Text(report.summary(), style="bold green" if report.all_hold else "bold red"))


def _area_table(report: Report, area: str) -> Table:
    table = Table(title=_title(report, area), title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(width=1)
    table.add_column(width=3, style="dim")
    table.add_column(overflow="fold")
    for check in report.of(area):
        text = Text(check.sentence)
        if check.outcome == "does not hold":
            text.append(f"\nexpected: {check.expected}\nseen:     {check.seen}", style="red")
        elif check.outcome == "not checked":
            text.append(f"\nnot checked: {check.seen}", style="yellow")
        table.add_row(Text(_MARKS[check.outcome], style=_COLOURS[check.outcome]), check.point, text)
    return table


def _title(report: Report, area: str) -> str:
    return f"\n{area} ({report.count('holds', area)} of {len(report.of(area))})"


def to_markdown(report: Report) -> str:
    """Return a table of counts per area, and a list of all checks per area."""
    lines = ["| area | holds | does not | not checked |", "|---|---|---|---|"]
    lines += [f"| {area} | {_counts(report, area)} |" for area in report.areas]
    lines.append(f"| **all** | {_counts(report, None)} |")
    for area in report.areas:
        lines += ["", f"### {area}", ""]
        lines += [_markdown_line(check) for check in report.of(area)]
    return "\n".join([*lines, ""])


def _counts(report: Report, area: str | None) -> str:
    return " | ".join(str(report.count(outcome, area)) for outcome in _MARKS)


def _markdown_line(check: Check) -> str:
    line = f"- {_MARKS[check.outcome]} {check.sentence} ({check.point})"
    if check.outcome == "does not hold":
        line += f"; expected `{check.expected}`, seen `{check.seen}`"
    elif check.outcome == "not checked":
        line += f"; {check.seen}"
    return line.replace("\n", " ")
