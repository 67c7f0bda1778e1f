"""Terminal output: bars and tables on a terminal, plain lines elsewhere. Results go to stdout, the rest to stderr."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, FileSizeColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from service.client.following import Update
from service.input_file import InputError

_PLAIN_INTERVAL_S: Final = 10.0
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3_600, 86_400


def console(*, is_stderr: bool = False) -> Console:
    """Return a console that prints text as it is, because text of servers and files may look like markup."""
    stream = sys.stderr if is_stderr else sys.stdout
    return Console(stderr=is_stderr, markup=False, highlight=False, emoji=False, soft_wrap=not stream.isatty())


def note(text: str) -> None:
    """Print text to stderr."""
    console(is_stderr=True).print(text)


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: ``1 error``, ``2 errors``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: ``1 h 30 min``."""
    whole = round(seconds)
    for unit_s, sign, smaller_s, smaller in ((_DAY_S, "d", _HOUR_S, "h"), (_HOUR_S, "h", _MINUTE_S, "min")):
        if whole >= unit_s:
            rest = whole % unit_s // smaller_s
            return f"{whole // unit_s} {sign} {rest} {smaller}" if rest else f"{whole // unit_s} {sign}"
    if whole >= _MINUTE_S:
        rest = whole % _MINUTE_S
        return f"{whole // _MINUTE_S} min {rest} s" if rest else f"{whole // _MINUTE_S} min"
    return f"{whole} s"


def progress_text(update: Update) -> str:
    """Return the counts, rate and remaining time of a batch, as far as they are known."""
    parts = []
    if update.total:
        parts.append(f"{update.done:,} of {update.total:,} lines")
    if update.failed:
        parts.append(f"{update.failed:,} failed")
    if update.status == "in_progress":
        if update.queue_position:
            parts.append(f"position {update.queue_position} in the queue")
        if update.rate_rows_per_second:
            parts.append(f"{update.rate_rows_per_second:,.1f} lines/s")
        if update.eta_s is not None:
            parts.append(f"{duration(update.eta_s)} left")
    return ", ".join(parts)


@contextmanager
def transfer(name: str, total_bytes: int | None, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Show the progress of an upload or download: a bar on a terminal, nothing elsewhere.

    Args:
        name: the name of the file.
        total_bytes: its size; None if unknown.
        quiet: whether to show nothing.

    Yields:
        A function that takes the number of bytes transferred so far.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda _done: None
        return
    size = FileSizeColumn() if total_bytes is None else DownloadColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), size, TransferSpeedColumn())
    with Progress(*columns, console=console(is_stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=total_bytes)
        yield lambda done: progress.update(task, completed=done)


class BatchProgress:
    """Progress of a batch on stderr, as a context: a bar on a terminal, a line for each change elsewhere.

    Args:
        quiet: whether to show nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._is_quiet = quiet
        self._last: Update | None = None
        self._printed_at = time.monotonic()
        self._bar: Progress | None = None
        if not quiet and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.fields[status]:<11}", markup=False),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[counts]}", markup=False),
                console=console(is_stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("", status="", counts="", total=None)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, update: Update) -> None:
        """Show the newest state. Without a terminal, progress within a state is printed every 10 s."""
        if self._bar:
            self._bar.update(
                self._task,
                total=update.total or None,
                completed=update.done,
                status=update.status,
                counts=progress_text(update),
            )
        elif not self._is_quiet:
            is_new_state = self._last is None or self._last.status != update.status
            if is_new_state or (update != self._last and time.monotonic() - self._printed_at >= _PLAIN_INTERVAL_S):
                self._last, self._printed_at = update, time.monotonic()
                note(f"{update.batch_id}  {update.status}  {progress_text(update)}".rstrip())


def print_table(target: Console, heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str]) -> None:
    """Print a table on a terminal, and tab-separated lines elsewhere, so that ``cut`` can read them.

    Args:
        target: the console.
        heads: the column headings.
        rows: the cells.
        right: the headings of right-aligned columns.
    """
    if not target.is_terminal:
        for row in (heads, *rows):
            print("\t".join(row), file=target.file)  # the console would turn tabs into spaces
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left", no_wrap=head != "message", overflow="fold")
    for row in rows:
        table.add_row(*row)
    target.print(table)


def print_errors(target: Console, errors: Sequence[InputError], error_count: int) -> None:
    """Print the listed errors of an input file, and the number of errors that are not listed."""
    rows = [(str(error.line or "file"), error.code, error.param or "", error.message) for error in errors]
    print_table(target, ("line", "code", "param", "message"), rows, right=("line",))
    if error_count > len(errors):
        target.print(f"… and {error_count - len(errors):,} more.")
