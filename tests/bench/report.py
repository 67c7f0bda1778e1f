"""The results as Markdown and as a chart. Pure.

Every table and chart with figures of a simulated device is headed "simulated".
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Final

from tests.bench.figures import DeviceFigures, spread
from tests.bench.measure import Result

Figure = Callable[[Result], float | None]


def _of_device(figure: Callable[[DeviceFigures], float]) -> Figure:
    return lambda result: None if result.device is None else figure(result.device)


# The heading of each column, its figure and its digits.
PROCESS_COLUMNS: Final[Sequence[tuple[str, Figure, int]]] = (
    ("total s", lambda result: result.total_s, 1),
    ("first row s", lambda result: result.first_row_s, 1),
)
MEMORY_COLUMN: Final[tuple[str, Figure, int]] = ("peak MB", lambda result: result.peak_mb, 0)
REAL_COLUMNS: Final = (*PROCESS_COLUMNS, ("steady rows/s", lambda result: result.rows_per_s, 1), MEMORY_COLUMN)
SIMULATED_COLUMNS: Final[Sequence[tuple[str, Figure, int]]] = (
    ("rows/s", lambda result: result.lines / result.device.seconds if result.device else None, 1),
    ("rows per busy s", _of_device(lambda device: device.rows_per_busy_s), 1),
    ("tokens/s", _of_device(lambda device: device.tokens_per_s), 0),
    ("rows running", _of_device(lambda device: device.running), 0),
    ("preemptions", _of_device(lambda device: device.preemptions), 0),
    ("busy %", _of_device(lambda device: 100 * device.busy_share), 0),
    ("hits %", _of_device(lambda device: 100 * device.hit_rate), 1),
    ("CPU ms per row", lambda result: result.cpu_ms_per_row, 1),
    *PROCESS_COLUMNS,
    MEMORY_COLUMN,
)


def table(results: Iterable[Result], columns: Sequence[tuple[str, Figure, int]]) -> str:
    """Return a Markdown table with medians and ranges, one line for each case and runner."""
    groups = grouped(results)
    lines = [
        "| case | runner | lines | runs | " + " | ".join(heading for heading, _, _ in columns) + " |",
        "|---|---|" + "---:|" * (len(columns) + 2),
    ]
    for (case, runner), runs in groups.items():
        cells = []
        for _, figure, digits in columns:
            values = [value for result in runs if (value := figure(result)) is not None]
            cells.append(spread(values).text(digits) if values else "")
        lines.append(f"| {case} | {runner} | {runs[0].lines:,} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def grouped(results: Iterable[Result]) -> Mapping[tuple[str, str], list[Result]]:
    """Return the runs of each case and runner, in the order of their first run."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.case, result.runner), []).append(result)
    return groups


def markdown(results: Sequence[Result], *, machine: str) -> str:
    """Return all tables.

    Args:
        results: all runs.
        machine: the machine and its load, for the headings.
    """
    parts = []
    if simulated := [result for result in results if result.device]:
        parts += [f"### Simulated GPU ({machine}; no figure is from a real GPU)", table(simulated, SIMULATED_COLUMNS)]
    if real := [result for result in results if not result.device]:
        parts += [f"### Demo model on the processors of this machine ({machine})", table(real, REAL_COLUMNS)]
    return "\n\n".join(parts) + "\n"


_ROW_HEIGHT: Final = 22
_LEFT: Final = 250
_WIDTH: Final = 820
_COLOURS: Final = {
    "limit": "#9aa5b1",
    "run_batch": "#5b8def",
    "http": "#56b3a8",
    "stock": "#e0a243",
    "cloister": "#c2455c",
}


def chart(results: Sequence[Result]) -> str:
    """Return an SVG with the rows per second of each case on a simulated device and each runner.

    The pale end of a bar is what the device would reach without waiting: its rows per busy second. Bars are scaled to
    the longest one of their case.
    """
    groups = grouped(result for result in results if result.device)
    rates = {}
    for key, runs in groups.items():
        devices = [(result.lines, result.device) for result in runs if result.device]
        rate = spread(lines / device.seconds for lines, device in devices).median
        rates[key] = (rate, max(rate, spread(device.rows_per_busy_s for _, device in devices).median))
    body: list[str] = []
    y = 46
    last = ""
    for (case, runner), (rate, busy_rate) in rates.items():
        if case != last:
            y += 26
            body.append(_text(12, y, case, weight="bold"))
            y += 8
            last = case
        scale = (_WIDTH - _LEFT - 130) / max(longest for (other, _), (_, longest) in rates.items() if other == case)
        colour = _COLOURS[runner]
        body += [
            _text(_LEFT - 10, y + 15, runner, anchor="end"),
            _bar(y + 3, busy_rate * scale, f'fill="{colour}" fill-opacity="0.35"'),
            _bar(y + 3, rate * scale, f'fill="{colour}"'),
            _text(round(_LEFT + busy_rate * scale + 6), y + 15, f"{rate:,.1f} of {busy_rate:,.1f}"),
        ]
        y += _ROW_HEIGHT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 16}" '
        f'viewBox="0 0 {_WIDTH} {y + 16}" font-family="sans-serif" font-size="13" role="img">'
    )
    title = "Simulated GPU: rows per second of the device's clock, of its rows per busy second"
    background = f'<rect width="{_WIDTH}" height="{y + 16}" fill="#ffffff"/>'
    return "\n".join(
        [
            head,
            f"<title>{escape(title, quote=False)}</title>",
            background,
            _text(12, 28, title, weight="bold"),
            *body,
            "</svg>\n",
        ]
    )


def _bar(y: int, width: float, style: str) -> str:
    return f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_ROW_HEIGHT - 6}" {style}/>'


def _text(x: int, y: int, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    content = escape(text, quote=False)
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="#222222">{content}</text>'
