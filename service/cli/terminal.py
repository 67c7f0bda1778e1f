"""How commands show things: bars and tables on a terminal, plain lines elsewhere.

Results go to stdout, all else to stderr.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, FileSizeColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from service.cli.following import Update
from service.input_file import InputError

_PLAIN_EVERY_S: Final = 10.0
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3_600, 86_400


def stdout() -> Console:
    """Text from a server or a file is shown as it is: it has no markup of ours."""
    return Console(markup=False, highlight=False, emoji=False, soft_wrap=not sys.stdout.isatty())


def stderr() -> Console:
    """The same, for progress, notes and errors."""
    return Console(stderr=True, markup=False, highlight=False, emoji=False, soft_wrap=not sys.stderr.isatty())


def counted(number: int, noun: str) -> str:
    """A number of things, in English."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def note(text: str) -> None:
    """Tells something that is not the result."""
    stderr().print(text)


class Shows(Protocol):
    """Something that shows the progress of a batch."""

    def show(self, update: Update) -> None:
        """Shows the newest state."""


@contextmanager
def transfer(what: str, total_bytes: int | None, *, quiet: bool = False) -> Iterator[Any]:
    """A function to call with the bytes that are done; a bar on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda _done: None
        return
    size = FileSizeColumn() if total_bytes is None else DownloadColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), size, TransferSpeedColumn())
    with Progress(*columns, console=stderr(), transient=True) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def batch_progress(*, quiet: bool = False) -> Iterator[Shows]:
    """Shows the updates of a batch: a bar on a terminal, a line for each change elsewhere."""
    if quiet:
        yield _Silent()
    elif sys.stderr.isatty():
        columns = (
            TextColumn("{task.fields[status]:<11}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[counts]}", markup=False),
        )
        with Progress(*columns, console=stderr(), transient=True) as progress:
            yield _Bar(progress, progress.add_task("", status="", counts="", total=None))
    else:
        yield _Lines()


class _Silent:
    def show(self, update: Update) -> None:
        """Shows nothing."""


@dataclass(slots=True)
class _Bar:
    progress: Progress
    task: Any

    def show(self, update: Update) -> None:
        self.progress.update(
            self.task,
            total=update.total or None,
            completed=update.done,
            status=update.status,
            counts=progress_text(update),
        )


@dataclass(slots=True)
class _Lines:
    last: Update | None = None
    told_at: float = field(default_factory=lambda: -_PLAIN_EVERY_S)

    def show(self, update: Update) -> None:
        is_new_state = self.last is None or self.last.status != update.status
        if is_new_state or (update != self.last and time.monotonic() - self.told_at >= _PLAIN_EVERY_S):
            self.last, self.told_at = update, time.monotonic()
            note(f"{update.batch_id}  {update.status}  {progress_text(update)}".rstrip())


def progress_text(update: Update) -> str:
    """Counts, rate and time left, as far as they are known."""
    parts = []
    if update.total:
        parts.append(f"{update.done:,} of {update.total:,} lines")
    if update.failed:
        parts.append(f"{update.failed:,} failed")
    if update.status == "in_progress":
        if update.queue_position:
            parts.append(f"waits, number {update.queue_position} in the queue")
        if update.rate_rows_per_second:
            parts.append(f"{update.rate_rows_per_second:,.1f} lines/s")
        if update.eta_s is not None:
            parts.append(f"{duration(update.eta_s)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """A length of time in its two largest units."""
    whole = round(seconds)
    for unit_s, sign, smaller_s, smaller in ((_DAY_S, "d", _HOUR_S, "h"), (_HOUR_S, "h", _MINUTE_S, "min")):
        if whole >= unit_s:
            rest = whole % unit_s // smaller_s
            return f"{whole // unit_s} {sign} {rest} {smaller}" if rest else f"{whole // unit_s} {sign}"
    if whole >= _MINUTE_S:
        rest = whole % _MINUTE_S
        return f"{whole // _MINUTE_S} min {rest} s" if rest else f"{whole // _MINUTE_S} min"
    return f"{whole} s"


def print_table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str]) -> None:
    """A table on a terminal; elsewhere lines with tabs between the cells, which other programs can cut."""
    if not console.is_terminal:
        for row in (heads, *rows):
            print("\t".join(row), file=console.file)  # the console would turn tabs into spaces
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left", no_wrap=head != "message", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_errors(console: Console, errors: Sequence[InputError], error_count: int) -> None:
    """The errors of an input file, and how many there are besides."""
    rows = [(str(error.line or "file"), error.code, error.param or "", error.message) for error in errors]
    print_table(console, ("line", "code", "param", "message"), rows, right=("line",))
    if error_count > len(errors):
        console.print(f"… and {error_count - len(errors):,} more.")
