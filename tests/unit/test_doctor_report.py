"""How the doctor tells what it found."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from service.cli.doctor.findings import Report, Result, failed, not_checked, ok, told
from service.errors import CloisterError


def test_a_report_has_a_line_for_each_finding_below_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(as_json=False)
    report.tell("here", [ok("a", "fine"), failed("b", "broken")])
    report.tell("there", [not_checked("c", "no key")])
    assert capsys.readouterr().out.splitlines() == [
        "here:", "  ok           a: fine", "  FAILED       b: broken", "there:", "  not checked  c: no key"
    ]  # fmt: skip
    report.end()
    assert capsys.readouterr().err == "1 ok, 1 FAILED, 1 not checked\n"
    assert not report.is_good


def test_a_report_in_json_ends_with_the_counts(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(as_json=True)
    report.tell("here", [ok("a", "fine")])
    report.end()
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"from": "here", "check": "a", "result": "ok", "message": "fine"},
        {"done": True, "ok": 1, "failed": 0, "not_checked": 0},
    ]


@pytest.mark.parametrize(("findings", "is_good"), [([], False), ([ok("a", "")], True), ([not_checked("a", "")], False)])
def test_a_report_is_good_if_something_was_checked_and_nothing_failed(findings: list[Any], is_good: bool) -> None:
    report = Report(as_json=True)
    report.tell("here", findings)
    assert report.is_good == is_good


def test_an_error_in_a_check_is_a_finding_after_those_before_it() -> None:
    def look() -> Iterator[Any]:
        yield ok("a", "fine")
        raise CloisterError("the store is gone")

    assert [(each.result, each.message) for each in told("a", look)] == [
        (Result.OK, "fine"), (Result.FAILED, "the store is gone")
    ]  # fmt: skip


def test_an_error_that_nobody_thought_of_is_a_finding_without_its_text() -> None:
    def look() -> Iterator[Any]:
        yield ok("a", "fine")
        int("not-to-be-told")

    fine, found = told("a", look)
    assert (fine.result, found.result) == (Result.OK, Result.FAILED)
    assert found.message.startswith("the check itself failed: ValueError in findings.py, line ")
