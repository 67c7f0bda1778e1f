"""Findings, errors of checks, and the report."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from service.doctor.findings import Finding, Report, Result, run_check
from service.errors import CloisterError

FINE = Finding.ok("a", "fine")


def test_report_lists_findings_below_their_viewpoint(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(as_json=False)
    report.add("here", [FINE, Finding.failed("b", "broken")])
    report.add("there", [Finding.not_checked("c", "no key")])
    assert capsys.readouterr().out.splitlines() == [
        "here:", "  ok           a: fine", "  FAILED       b: broken", "there:", "  not checked  c: no key"
    ]  # fmt: skip
    report.end()
    assert capsys.readouterr().err == "to correct: b (here)\n1 ok, 1 FAILED, 1 not checked\n"
    assert not report.is_good


def test_json_report_ends_with_the_counts(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(as_json=True)
    report.add("here", [FINE])
    report.end()
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"from": "here", "check": "a", "result": "ok", "message": "fine"},
        {"done": True, "ok": 1, "warning": 0, "failed": 0, "not_checked": 0},
    ]


@pytest.mark.parametrize(
    ("findings", "is_good"),
    [
        ([], False),
        ([FINE], True),
        ([Finding.not_checked("a", "")], False),
        ([FINE, Finding.not_checked("a", "")], True),
        ([FINE, Finding.failed("a", "")], False),
    ],
)
def test_report_is_good_if_a_check_passed_and_none_failed(findings: list[Finding], is_good: bool) -> None:
    report = Report(as_json=True)
    report.add("here", findings)
    assert report.is_good == is_good


def test_error_in_a_check_becomes_a_finding() -> None:
    def check() -> Iterator[Finding]:
        yield FINE
        raise CloisterError("the store is gone")

    assert list(run_check("a", check)) == [FINE, Finding(check="a", result=Result.FAILED, message="the store is gone")]


def test_text_of_an_unknown_error_is_not_reported() -> None:
    def check(text: Any) -> Iterator[Finding]:
        yield FINE
        int(text)

    fine, found = run_check("a", check, "secret-value")
    assert (fine, found.result) == (FINE, Result.FAILED)
    assert found.message.startswith("the check itself failed: ValueError in findings.py, line ")
