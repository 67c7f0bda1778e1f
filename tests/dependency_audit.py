"""Check of all pinned packages for known vulnerabilities, by pip-audit: ``python -m tests.dependency_audit``.

The exit status is 1 if a package has an advisory that constraints/accepted-advisories.toml does not accept. Where the
database of advisories is unavailable, the check is skipped with the reason. ``PIP_AUDIT_VULNERABILITY_SERVICE`` and
``PIP_AUDIT_OSV_URL`` select another database than PyPI's (https://github.com/pypa/pip-audit#environment-variables).
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
ACCEPTED: Final = ROOT / "constraints" / "accepted-advisories.toml"
LONGEST: Final = timedelta(days=180)
_PIP_AUDIT: Final = "pip-audit==2.10.1"
_TIMEOUT_S: Final = 1_800


class UnavailableError(Exception):
    """The database of advisories, or pip-audit itself, is out of reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedAdvisory:
    """An advisory that is no failure until its end."""

    id: str
    package: str
    reason: str
    expires: date


def accepted_advisories(text: str) -> list[AcceptedAdvisory]:
    """Parse the file of accepted advisories.

    Raises:
        ValueError: an entry lacks its reason, or its end is further ahead than 180 days.
        TypeError: an entry has another key, or lacks one.
    """
    entries = [AcceptedAdvisory(**entry) for entry in tomllib.loads(text).get("advisory", [])]
    for entry in entries:
        if not entry.reason.strip() or entry.expires - _today() > LONGEST:
            raise ValueError(f"{entry.id}: needs a reason, and an end at most {LONGEST.days} days ahead")
    return entries


def problems(report: Mapping[str, Any], accepted: Collection[AcceptedAdvisory]) -> list[str]:
    """Return the advisories in a report of pip-audit that are not accepted, or no longer."""
    valid = {(entry.package, entry.id) for entry in accepted if entry.expires >= _today()}
    found = []
    for package in report["dependencies"]:
        for advisory in package.get("vulns", ()):
            ids = (advisory["id"], *advisory.get("aliases", ()))
            if not any((package["name"], each) in valid for each in ids):
                fixed = ", ".join(advisory.get("fix_versions", ())) or "no version"
                found.append(f"{package['name']} {package['version']}: {', '.join(ids)}; fixed in {fixed}")
    return found


def unchecked(report: Mapping[str, Any]) -> list[str]:
    """Return the packages that the database does not know, which pip-audit skips.

    Raises:
        UnavailableError: it knows none, as of a mirror without advisories. pip-audit reports that as success.
    """
    skipped = [package["name"] for package in report["dependencies"] if "skip_reason" in package]
    if len(skipped) == len(report["dependencies"]):
        raise UnavailableError("the package index has no advisories for any of the packages")
    return skipped


def audit(requirements: Path) -> Any:
    """Return the report of pip-audit, as parsed JSON, on a file of pinned requirements.

    Raises:
        UnavailableError: pip-audit could not be installed, or could not reach its database.
    """
    tool = [Path(sys.executable).with_name("uv"), "tool", "run", "--from", _PIP_AUDIT, "pip-audit"]
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--desc", "off", "--format", "json"]
    try:
        ended = subprocess.run(
            [*tool, *options, "--requirement", requirements],
            capture_output=True, text=True, check=False, timeout=_TIMEOUT_S,
        )  # fmt: skip
        return json.loads(ended.stdout)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"pip-audit did not end within {_TIMEOUT_S} s") from error
    except json.JSONDecodeError as error:
        reason = ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"]
        raise UnavailableError(f"pip-audit failed: {reason[-1]}") from error


def main() -> int:
    """Audit each file of pinned versions, and return the exit status."""
    accepted = accepted_advisories(ACCEPTED.read_text())
    # The smallest first: without a database, one request is enough to find that out.
    files = sorted(
        (*ROOT.glob("constraints/*.txt"), *ROOT.glob("images/constraints/*.txt")), key=lambda path: path.stat().st_size
    )
    failed = False
    for path in files:
        if path.name.endswith("-overrides.txt"):
            continue
        try:
            report = audit(path)
            missing = unchecked(report)
        except UnavailableError as error:
            print(f"pip-audit: SKIPPED, nothing was checked from {path.relative_to(ROOT)} on: {error}")
            return int(failed)
        found = problems(report, accepted)
        failed |= bool(found)
        note = f", not in the database: {', '.join(missing)}" if missing else ""
        count = len(report["dependencies"]) - len(missing)
        print(f"pip-audit: {path.relative_to(ROOT)}: {count} packages checked, {len(found)} advisories{note}")
        print("".join(f"  {line}\n" for line in found), end="")
    if failed:
        print(f"Take newer versions (`make UPGRADE=1 lock`), or accept advisories in {ACCEPTED.relative_to(ROOT)}.")
    return int(failed)


def _today() -> date:
    return datetime.now(UTC).date()


if __name__ == "__main__":
    sys.exit(main())
