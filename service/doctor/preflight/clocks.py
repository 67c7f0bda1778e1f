"""Clocks of nodes, compared with that of the API server."""

from typing import Final

from service.doctor.findings import Finding

_MAX_SKEW_S: Final = 60.0
_NOTABLE_SKEW_S: Final = 5.0


def clock_finding(check: str, skew_s: float | None) -> Finding:
    """Return the finding on a clock.

    Args:
        check: the subject of the finding.
        skew_s: how far it is ahead of the API server's clock, in seconds; None if that did not answer.
    """
    if skew_s is None:
        return Finding.not_checked(check, "from a pod there, the API server's clock cannot be read")
    found = f"it is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the API server's"
    advice = "Synchronize the nodes with one time server (chrony, systemd-timesyncd)"
    if abs(skew_s) > _MAX_SKEW_S:
        return Finding.failed(check, f"{found}: tokens and signed URLs can be refused. {advice}")
    if abs(skew_s) > _NOTABLE_SKEW_S:
        return Finding.warning(check, f"{found}. {advice}")
    return Finding.ok(check, f"it differs by less than {_NOTABLE_SKEW_S:.0f} s from the API server's")
