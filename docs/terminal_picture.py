# ruff: noqa: INP001
"""Draw docs/demo.svg: record a command in a terminal, then draw the recording as an SVG that plays once.

    python docs/terminal_picture.py record demo.cast -- python -m service.local.demo --model … --directory …
    python docs/terminal_picture.py draw demo.cast docs/demo.svg --command "make demo"

The recording is an asciicast, version 2 (https://docs.asciinema.org/manual/asciicast/v2/). Every character of the
picture comes from it, except the prompt, the command and the title. A viewer without animation shows the last screen.
"""

import argparse
import fcntl
import json
import os
import pty
import re
import struct
import termios
import time
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path

COLUMNS, ROWS = 128, 60
SPEED = 8  # the picture plays this many times as fast as the run
FRAME_S = 0.25  # screens that follow each other faster than this in the picture are left out
CHARACTER_PX, LINE_PX, MARGIN_PX, TITLE_PX = 7.83, 18, 16, 34
BACKGROUND, FOREGROUND, DIM = "#16191f", "#d7dae0", "#868d99"
PALETTE = ("#3f4451", "#e05561", "#8cc265", "#d18f52", "#4aa5f0", "#c162de", "#42b3c2", "#d7dae0")
LEVELS = (0, 95, 135, 175, 215, 255)  # of xterm's cube of 216 colours
TOKENS = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b.|([\r\n])|([^\x00-\x1f\x7f-\x9f]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Style of a character."""

    colour: str = FOREGROUND
    bold: bool = False
    italic: bool = False


Cell = tuple[str, Style]
Line = tuple[Cell, ...]


@dataclass(slots=True)
class Screen:
    """The lines that a terminal shows. Knows the sequences that rich writes."""

    lines: list[list[Cell]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    style: Style = field(default_factory=Style)

    def write(self, text: str) -> None:
        """Apply the output of a program."""
        for code, command, control, plain in TOKENS.findall(text):
            if plain:
                line = self.lines[self.row]
                line.extend((" ", Style()) for _ in range(self.column - len(line)))
                line[self.column : self.column + len(plain)] = [(character, self.style) for character in plain]
                self.column += len(plain)
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self.row += 1
                while len(self.lines) <= self.row:
                    self.lines.append([])
            elif command == "A":
                self.row = max(0, self.row - int(code or 1))
            elif command == "K":
                self.lines[self.row] = [] if code == "2" else self.lines[self.row][: self.column]
            elif command == "m":
                self.style = styled(self.style, [int(number or 0) for number in code.split(";")])

    def shown(self) -> tuple[Line, ...]:
        """Return the lines as they are now."""
        return tuple(tuple(line) for line in self.lines)


def styled(style: Style, codes: list[int]) -> Style:
    """Return the style after a sequence of SGR codes."""
    while codes:
        code = codes.pop(0)
        if code == 0:
            style = Style()
        elif code == 1:
            style = replace(style, bold=True)
        elif code == 2:  # noqa: PLR2004 - faint
            style = replace(style, colour=DIM)
        elif code == 3:  # noqa: PLR2004 - italic
            style = replace(style, italic=True)
        elif code in range(30, 38):
            style = replace(style, colour=PALETTE[code - 30])
        elif code in range(90, 98):
            style = replace(style, colour=PALETTE[code - 90])
        elif code == 38 and codes[:1] == [5]:  # noqa: PLR2004 - one of 256 colours
            style, codes = replace(style, colour=xterm_colour(codes[1])), codes[2:]
    return style


def xterm_colour(number: int) -> str:
    """Return a colour of xterm's table of 256 as #rrggbb."""
    if number < 16:  # noqa: PLR2004
        return PALETTE[number % 8]
    if number >= 232:  # noqa: PLR2004 - 24 greys
        return f"#{8 + 10 * (number - 232):02x}" + f"{8 + 10 * (number - 232):02x}" * 2
    number -= 16
    return "#" + "".join(f"{LEVELS[level]:02x}" for level in (number // 36, number // 6 % 6, number % 6))


def record(path: Path, command: list[str]) -> int:
    """Run a command in a terminal and write its output with its times; return the exit code."""
    began_s = time.monotonic()
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS))
        os.environ.pop("COLORTERM", None)
        os.execvp(command[0], command)  # noqa: S606
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    with path.open("w") as out:
        out.write(json.dumps({"version": 2, "width": COLUMNS, "height": ROWS}) + "\n")
        while True:
            try:
                chunk = os.read(terminal, 65536)
            except OSError:  # Linux reports the end of a terminal as EIO
                break
            out.write(json.dumps([round(time.monotonic() - began_s, 3), "o", chunk.decode(errors="replace")]) + "\n")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def screens_of(recording: Path) -> list[tuple[float, tuple[Line, ...]]]:
    """Replay a recording; return each screen that the picture shows, with its time in the run in seconds."""
    screen = Screen()
    screens: list[tuple[float, tuple[Line, ...]]] = [(0.0, screen.shown())]
    for event in map(json.loads, recording.read_text().splitlines()[1:]):
        if event[0] - screens[-1][0] >= FRAME_S * SPEED:
            screens.append((event[0], screen.shown()))
        screen.write(event[2])
        last_s = event[0]
    return [*screens, (last_s, screen.shown())]


def line_svg(line: Line, y: float) -> str:
    """Draw one line, a ``tspan`` for each run of characters of one style."""
    spans = []
    start = 0
    for end in range(1, len(line) + 1):
        if end < len(line) and line[end][1] == line[start][1]:
            continue
        text, style = "".join(character for character, _ in line[start:end]), line[start][1]
        if text.strip():
            attributes = f' fill="{style.colour}"' if style.colour != FOREGROUND else ""
            attributes += ' font-weight="bold"' if style.bold else ""
            attributes += ' font-style="italic"' if style.italic else ""
            at, width = MARGIN_PX + start * CHARACTER_PX, len(text) * CHARACTER_PX
            spans.append(
                f'<tspan x="{at:.1f}" textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs"{attributes}>'
                f"{escape(text, quote=False)}</tspan>"
            )
        start = end
    return f'<text y="{y:.0f}">{"".join(spans)}</text>'


def draw(recording: Path, command: str) -> str:
    """Draw a recording as an SVG."""
    screens = screens_of(recording)
    duration_s = screens[-1][0]
    prompt = tuple((character, Style(colour=PALETTE[2])) for character in "$ ")
    prompt += tuple((character, Style(bold=True)) for character in command)
    rows = max(len(lines) for _, lines in screens)
    height = TITLE_PX + (rows + 1) * LINE_PX + MARGIN_PX
    columns = json.loads(recording.read_text().splitlines()[0])["width"]
    width = columns * CHARACTER_PX + 2 * MARGIN_PX
    title = f"{command} · {duration_s:.0f} s, shown {SPEED} times as fast"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img"',
        f'fill="{FOREGROUND}"',
        'font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="13"',
        'xml:space="preserve">',
        f"<title>A recorded run of {escape(title)}</title>",
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
        *(f'<circle cx="{20 + 18 * n}" cy="17" r="5.5" fill="{PALETTE[n + 1]}"/>' for n in range(3)),
        f'<text x="50%" y="21" fill="{DIM}" text-anchor="middle">{escape(title)}</text>',
        line_svg(prompt, TITLE_PX + LINE_PX),
    ]
    for row in range(rows):
        # Each text that the row shows in turn, with the times in the picture between which it is visible.
        versions: list[tuple[float, Line]] = []
        for at_s, lines in screens:
            line = lines[row] if row < len(lines) else ()
            if not versions or versions[-1][1] != line:
                versions.append((at_s / SPEED, line))
        for index, (begin_s, line) in enumerate(versions):
            if not any(character.strip() for character, _ in line):
                continue
            drawn = line_svg(line, TITLE_PX + (row + 2) * LINE_PX)
            if index == len(versions) - 1:
                shown = f'<set attributeName="visibility" to="hidden" begin="0s" end="{begin_s:.2f}s"/>'
            else:
                drawn = drawn.replace("<text ", '<text visibility="hidden" ', 1)
                end_s = versions[index + 1][0]
                shown = f'<set attributeName="visibility" to="visible" begin="{begin_s:.2f}s" end="{end_s:.2f}s"/>'
            parts.append(drawn.replace("</text>", f"{shown}</text>"))
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Record a command in a terminal and draw the recording as an SVG.")
    actions = parser.add_subparsers(dest="action", required=True)
    recorder = actions.add_parser("record")
    recorder.add_argument("recording", type=Path)
    recorder.add_argument("command", nargs="+")
    drawer = actions.add_parser("draw")
    drawer.add_argument("recording", type=Path)
    drawer.add_argument("picture", type=Path)
    drawer.add_argument("--command", required=True, help="what the picture shows behind the prompt")
    arguments = parser.parse_args()
    if arguments.action == "record":
        return record(arguments.recording, arguments.command)
    arguments.picture.write_text(draw(arguments.recording, arguments.command))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
