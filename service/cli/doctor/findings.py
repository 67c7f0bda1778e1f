"""What a check found, and how it is told: one line as soon as it is known, and a summary at the end."""

import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from service.cli.terminal import note
from service.errors import CloisterError


class Result(StrEnum):
    """``not_checked`` is no failure, and never silent: the message says why, and what would check it."""

    OK = "ok"
    FAILED = "failed"
    NOT_CHECKED = "not_checked"


_SERVICE: Final = str(Path(__file__).parents[2])
_SHOWN: Final = {Result.OK: "ok", Result.FAILED: "FAILED", Result.NOT_CHECKED: "not checked"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        check: what was looked at.
        result: how it is.
        message: what was seen; where it failed, what is wrong, where, and what to do.
    """

    check: str
    result: Result
    message: str


def ok(check: str, message: str) -> Finding:
    """It is as it must be."""
    return Finding(check, Result.OK, message)


def failed(check: str, message: str) -> Finding:
    """It is not; the message says what to do."""
    return Finding(check, Result.FAILED, message)


def not_checked(check: str, message: str) -> Finding:
    """It cannot be told from here; the message says why."""
    return Finding(check, Result.NOT_CHECKED, message)


class RefusedError(CloisterError):
    """Whoever asks has no right to see what a check needs."""


def told(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What a check finds; an error on the way is a finding too, and the next check gets its turn."""
    try:
        yield from look()
    except RefusedError as error:
        yield not_checked(check, str(error))
    except CloisterError as error:
        yield failed(check, str(error))
    except Exception as error:  # noqa: BLE001 - the shell of the loop: one check never stops the others
        yield failed(check, f"the check itself failed: {_unexpected(error)}")


def _unexpected(error: Exception) -> str:
    """Its kind and place. Its own text may quote what was read, such as a password."""
    ours = [each for each in traceback.extract_tb(error.__traceback__) if each.filename.startswith(_SERVICE)]
    return f"{type(error).__name__} in {Path(ours[-1].filename).name}, line {ours[-1].lineno}"


@dataclass(slots=True)
class Report:
    """Tells the findings as they come, and counts them.

    Attributes:
        as_json: one JSON object for each, and one with the counts at the end.
    """

    as_json: bool
    _counts: Counter[Result] = field(default_factory=Counter)
    _place: str = ""

    def tell(self, place: str, findings: Iterable[Finding]) -> None:
        """Tells what was found from one place, such as ``in a pod``."""
        for finding in findings:
            self._counts[finding.result] += 1
            if self.as_json:
                record = {"from": place, "check": finding.check, "result": finding.result, "message": finding.message}
                print(json.dumps(record, ensure_ascii=False), flush=True)
                continue
            if place != self._place:
                print(f"{place}:", flush=True)
                self._place = place
            print(f"  {_SHOWN[finding.result]:<11}  {finding.check}: {finding.message}", flush=True)

    def end(self) -> None:
        """Tells how often each result was. Where this is missing, so may be findings before it."""
        if self.as_json:
            print(json.dumps({"done": True, **{str(result): self._counts[result] for result in Result}}), flush=True)
        else:
            note(", ".join(f"{self._counts[result]} {shown}" for result, shown in _SHOWN.items()))

    @property
    def is_good(self) -> bool:
        """Something was checked, and nothing has failed."""
        return bool(self._counts[Result.OK]) and not self._counts[Result.FAILED]
