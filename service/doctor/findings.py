"""Findings and their report: one line as soon as a finding is known, and a summary at the end."""

import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, ParamSpec, Self

from service.client.terminal import note
from service.errors import CloisterError

Arguments = ParamSpec("Arguments")
_FORBIDDEN: Final = 403
_SERVICE: Final = str(Path(__file__).parents[1])


class Result(StrEnum):
    """Result of a check.

    ``not_checked`` is no failure; its message gives the reason and what would allow the check. ``warning`` is none
    either: it names a risk that the settings accept.
    """

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_CHECKED = "not_checked"


_LABELS: Final = {
    Result.OK: "ok",
    Result.WARNING: "warning",
    Result.FAILED: "FAILED",
    Result.NOT_CHECKED: "not checked",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Outcome of one check.

    Attributes:
        check: the subject of the check.
        result: its result.
        message: the observed state; after a failure what is wrong, where, and what to do.
    """

    check: str
    result: Result
    message: str

    @classmethod
    def ok(cls, check: str, message: str) -> Self:
        """Return the finding of a check that passed."""
        return cls(check, Result.OK, message)

    @classmethod
    def warning(cls, check: str, message: str) -> Self:
        """Return the finding of a risk that the settings accept."""
        return cls(check, Result.WARNING, message)

    @classmethod
    def failed(cls, check: str, message: str) -> Self:
        """Return the finding of a check that failed. The message includes advice."""
        return cls(check, Result.FAILED, message)

    @classmethod
    def not_checked(cls, check: str, message: str) -> Self:
        """Return the finding of a check that is impossible here. The message gives the reason."""
        return cls(check, Result.NOT_CHECKED, message)


class ClusterError(CloisterError):
    """The API server of a cluster is unreachable or refused a request.

    Args:
        message: the request and the answer.
        status: the HTTP status; 0 without an answer.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_forbidden(self) -> bool:
        """True if the user lacks the permission."""
        return self.status == _FORBIDDEN


def run_check(
    check: str, function: Callable[Arguments, Iterable[Finding]], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Iterator[Finding]:
    """Yield the findings of a check. An error becomes a finding too, so that the next check runs.

    A check that the user has no permission for is not checked; any other error is a failure.

    Args:
        check: the subject, for an error.
        function: the check.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    try:
        yield from function(*args, **kwargs)
    except CloisterError as error:
        is_forbidden = isinstance(error, ClusterError) and error.is_forbidden
        yield Finding(check, Result.NOT_CHECKED if is_forbidden else Result.FAILED, str(error))
    except Exception as error:  # noqa: BLE001 - one check never stops the others
        # The text of an unknown error may quote what was read, such as a password: report its type and place only.
        frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename.startswith(_SERVICE)]
        place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}"
        yield Finding.failed(check, f"the check itself failed: {type(error).__name__} in {place}")


@dataclass(slots=True)
class Report:
    """Prints findings as they arrive, and counts them.

    Attributes:
        as_json: print one JSON object for each finding, and one with the counts at the end.
    """

    as_json: bool
    _counts: Counter[Result] = field(default_factory=Counter)
    _failures: list[str] = field(default_factory=list)
    _viewpoint: str = ""

    def add(self, viewpoint: str, findings: Iterable[Finding]) -> None:
        """Print the findings of a viewpoint, such as ``in a pod of api``."""
        for finding in findings:
            self._counts[finding.result] += 1
            if self.as_json:
                record = {
                    "from": viewpoint,
                    "check": finding.check,
                    "result": finding.result,
                    "message": finding.message,
                }
                print(json.dumps(record, ensure_ascii=False), flush=True)
                continue
            if viewpoint != self._viewpoint:
                print(f"{viewpoint}:", flush=True)
                self._viewpoint = viewpoint
            print(f"  {_LABELS[finding.result]:<11}  {finding.check}: {finding.message}", flush=True)
            if finding.result == Result.FAILED:
                self._failures.append(f"{finding.check} ({viewpoint})")

    def end(self) -> None:
        """Print the number of each result. A report without this line is incomplete."""
        if self.as_json:
            print(json.dumps({"done": True, **{str(result): self._counts[result] for result in Result}}), flush=True)
        else:
            shown = [result for result in Result if self._counts[result] or result != Result.WARNING]
            if self._failures:
                note(f"to correct: {'; '.join(self._failures)}")
            note(", ".join(f"{self._counts[result]} {_LABELS[result]}" for result in shown))

    @property
    def is_good(self) -> bool:
        """True if at least one check passed and none failed."""
        return bool(self._counts[Result.OK]) and not self._counts[Result.FAILED]
