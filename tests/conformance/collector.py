"""Pytest plugin that turns each test into one check of the table."""

import time
from collections.abc import Generator
from typing import Any, Final

import pytest
from rich.console import Console
from rich.progress import Progress

from tests.conformance.contract import AREAS
from tests.conformance.report import Check, Outcome, Report
from tests.conformance.target import Target

PLUGIN_NAME: Final = "conformance"
_MAX_SHOWN: Final = 300
_EXTENSIONS: Final = "test_extensions"


class Collector:
    """Collect the outcome of every test, and run the checks that wait for an engine last.

    Attributes:
        target: the server to check.
        extensions: check cloister's extensions too.
        listed: area, point and sentence of every collected check, in the order of the files.
    """

    def __init__(self, target: Target, *, extensions: bool, console: Console) -> None:
        self.target = target
        self.extensions = extensions
        self._checks: list[tuple[int, Check]] = []
        self._progress = Progress(console=console, transient=True)
        self._task = self._progress.add_task("checking")
        self._order: dict[str, int] = {}
        self._compared: tuple[str, str] | None = None
        self.listed: list[tuple[str, str, str]] = []
        self._began_s = time.monotonic()

    def report(self) -> Report:
        """Return the checks so far, in the order of the files."""
        return Report(
            base_url=self.target.base_url,
            model=self.target.model,
            duration_s=time.monotonic() - self._began_s,
            checks=tuple(check for _, check in sorted(self._checks, key=lambda item: item[0])),
        )

    def pytest_configure(self, config: pytest.Config) -> None:
        """Declare the markers."""
        config.addinivalue_line("markers", "point(key): point of the contract that a check cites")
        config.addinivalue_line("markers", "late: reads the end of a batch that runs in the engine")

    def pytest_ignore_collect(self, collection_path: Any) -> bool | None:
        """Skip the module of extensions unless extensions are requested."""
        return True if collection_path.stem == _EXTENSIONS and not self.extensions else None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Record the order of the files, then move checks that wait for an engine to the end."""
        self._order = {item.nodeid: number for number, item in enumerate(items)}
        self.listed = [(_area(item), _point(item), sentence(item.name)) for item in items]
        items.sort(key=lambda item: item.get_closest_marker("late") is not None)

    def pytest_sessionstart(self) -> None:
        """Show the progress bar."""
        self._progress.start()

    def pytest_sessionfinish(self) -> None:
        """Remove the progress bar."""
        self._progress.stop()

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Show the area of the current check."""
        self._compared = None
        self._progress.update(self._task, total=len(self._order), description=_area(item))

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> None:
        """Keep both sides of a failed comparison; checks compare as ``assert seen == expected``."""
        prefix = "" if op == "==" else f"{op} "
        self._compared = (f"{prefix}{_shortened(right)}", _shortened(left))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record a check for each test: from its call, or from a setup that failed or was skipped."""
        report = yield
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self._checks.append((self._order[item.nodeid], self._check(item, call, report)))
            self._progress.advance(self._task)
        return report

    def _check(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> Check:
        outcomes: dict[str, Outcome] = {"passed": "holds", "failed": "does not hold", "skipped": "not checked"}
        expected = seen = ""
        if report.failed:
            expected, seen = self._difference(call)
        elif report.skipped and call.excinfo is not None:
            seen = str(call.excinfo.value).removeprefix("Skipped: ")
        return Check(
            area=_area(item),
            sentence=sentence(item.name),
            point=_point(item),
            outcome=outcomes[report.outcome],
            expected=expected,
            seen=seen,
        )

    def _difference(self, call: pytest.CallInfo[None]) -> tuple[str, str]:
        assert call.excinfo is not None
        error = call.excinfo.value
        if isinstance(error, AssertionError) and self._compared is not None:
            expected, seen = self._compared
            note = str(error).partition("\nassert ")[0]
            return expected, seen if note.startswith("assert ") or not note else f"{seen}: {_shortened(note)}"
        if isinstance(error, AssertionError | pytest.fail.Exception):
            return "that it holds", _shortened(str(error))
        return "no error", _shortened(f"{type(error).__name__}: {error}")


def sentence(name: str) -> str:
    """Return the sentence in the name of a test: ``test_a_b[c d]`` is "a b: c d"."""
    words, _, case = name.removeprefix("test_").partition("[")
    words = words.replace("_", " ")
    return f"{words}: {case.removesuffix(']')}" if case else words


def _area(item: pytest.Item) -> str:
    return AREAS[item.path.stem]


def _point(item: pytest.Item) -> str:
    marker = item.get_closest_marker("point")
    return str(marker.args[0]) if marker else ""


def _shortened(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
