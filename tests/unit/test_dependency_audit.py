from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.dependency_audit import ACCEPTED, UnavailableError, accepted_advisories, problems, unchecked

TODAY = datetime.now(UTC).date()
VULNERABLE = {
    "name": "requests",
    "version": "2.31.0",
    "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.32.0"]}],
}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited"}


def report(*packages: dict[str, Any]) -> dict[str, Any]:
    return {"dependencies": list(packages)}


def accepted(days: int, *, name: str = "CVE-1", package: str = "requests", reason: str = "unused") -> str:
    entry = {"id": name, "package": package, "reason": reason}
    lines = (f'{key} = "{value}"\n' for key, value in entry.items())
    return f"[[advisory]]\n{''.join(lines)}expires = {TODAY + timedelta(days=days)}\n"


def test_accepted_advisories_of_the_repository_are_valid_and_not_expired() -> None:
    expired = [entry.id for entry in accepted_advisories(ACCEPTED.read_text()) if entry.expires < TODAY]
    assert not expired, f"{ACCEPTED}: take newer versions, or set another end with its reason"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 1),
        (accepted(0), 0),
        (accepted(30, name="PYSEC-1"), 0),
        (accepted(-1), 1),
        (accepted(30, name="CVE-2"), 1),
        (accepted(30, package="urllib3"), 1),
    ],
)
def test_advisory_is_a_problem_unless_it_is_accepted_and_not_expired(text: str, count: int) -> None:
    found = problems(report(VULNERABLE, UNKNOWN), accepted_advisories(text))
    assert len(found) == count
    assert all(line == "requests 2.31.0: PYSEC-1, CVE-1; fixed in 2.32.0" for line in found)


@pytest.mark.parametrize("text", [accepted(181), accepted(30, reason=" ")])
def test_advisory_is_not_accepted_for_ever_or_without_a_reason(text: str) -> None:
    with pytest.raises(ValueError, match="CVE-1: needs a reason, and an end"):
        accepted_advisories(text)


def test_index_without_advisories_is_no_success() -> None:
    assert unchecked(report(VULNERABLE, UNKNOWN)) == ["torch"]
    with pytest.raises(UnavailableError, match="no advisories"):
        unchecked(report(UNKNOWN, UNKNOWN))
