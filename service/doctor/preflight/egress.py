"""Egress of pods: which destinations they reach, compared with what the policies allow, and the report of it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

from service.doctor.findings import Finding

Expected = Literal["open", "closed"]
Found = Literal["open", "refused", "no answer", "unreachable", "no address", "not tried"]

EXTERNAL: Final = (
    "1.1.1.1:443",
    "example.com.:443",
    # Metadata of AWS, Google Cloud, Azure and OpenStack; of EKS; of AWS by IPv6; of Alibaba Cloud; Azure's host.
    "169.254.169.254:80",
    "169.254.170.23:80",
    "[fd00:ec2::254]:80",
    "100.100.100.200:80",
    "168.63.129.16:80",
)
"""Destinations outside of the cluster that no pod may reach: an address and a name, and the metadata of clouds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """A TCP destination.

    Attributes:
        name: what answers there.
        host: its address or name.
        port: its port.
        on_own_node: whether it is on the node of the pod. Policies do not reliably isolate a pod from its own node.
    """

    name: str
    host: str
    port: int
    on_own_node: bool = False

    @property
    def place(self) -> str:
        """``10.0.0.1:443``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One attempt to connect.

    Attributes:
        source: the pod, by its role.
        destination: the destination.
        expected: what the policies allow.
        found: the outcome.
        without_policies: the outcome from a pod that no policy of the stack selects.
        address: the address that was tried; empty if a name has none.
        seconds: the duration.
        time: the moment.
    """

    source: str
    destination: Destination
    expected: Expected
    found: Found
    without_policies: Found
    address: str
    seconds: float
    time: datetime

    @property
    def is_as_expected(self) -> bool:
        """True if the connection was open exactly if the policies allow it."""
        return (self.found == "open") == (self.expected == "open")

    @property
    def is_proven(self) -> bool:
        """True if the policies made the difference: the same connection is open without them."""
        return self.found != "open" and self.without_policies == "open"


def parse_destination(text: str) -> Destination:
    """Parse ``host:port`` or ``[IPv6 address]:port``.

    Raises:
        ValueError: the text has another form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{text!r} is not HOST:PORT, such as 1.1.1.1:443 or [fd00::1]:80")
    host = host.removeprefix("[").removesuffix("]")
    return Destination(name="outside of the cluster", host=host, port=int(port))


def egress_findings(rows: Sequence[Row]) -> Iterator[Finding]:
    """Yield one finding for each source.

    Args:
        rows: the attempts of all sources.
    """
    for source in dict.fromkeys(row.source for row in rows):
        check, own = f"egress of {source}", [row for row in rows if row.source == source]
        leaks = [row for row in own if not row.is_as_expected and row.expected == "closed"]
        forbidden = [f"{row.destination.name} at {row.destination.place}" for row in leaks if not _is_own_node(row)]
        tolerated = [f"{row.destination.name} at {row.destination.place}" for row in leaks if _is_own_node(row)]
        missing = [
            f"{row.destination.name} at {row.destination.place} ({row.found})"
            for row in own
            if not row.is_as_expected and row.expected == "open"
        ]
        if forbidden:
            yield Finding.failed(
                check,
                f"it reaches {', '.join(forbidden)}, which the policies forbid. Use a network plugin that enforces "
                "NetworkPolicy, or enable it; `kubectl get networkpolicies` shows a policy that allows more",
            )
        if missing:
            yield Finding.failed(
                check,
                f"it does not reach {', '.join(missing)}, which the policies allow. Check `network.kubernetes_api` "
                "and the network plugin",
            )
        if tolerated:
            yield Finding.warning(
                check,
                f"it reaches {', '.join(tolerated)}: no NetworkPolicy reliably isolates a pod from its own node; let "
                "the node's own services require a login",
            )
        if not (forbidden or missing or tolerated):
            proven = sum(row.is_proven for row in own)
            closed = sum(row.expected == "closed" for row in own)
            yield Finding.ok(
                check,
                f"{len(own)} destinations as expected. Of {closed} closed ones a pod without policies reaches {proven}",
            )


def _is_own_node(row: Row) -> bool:
    return row.destination.on_own_node


def write_report(directory: Path, rows: Sequence[Row], *, cluster: str, namespace: str, now: datetime) -> Path:
    """Write the report as ``egress-<time>.md`` and ``.json``.

    Args:
        directory: the directory, which is created.
        rows: the attempts.
        cluster: URL of the API server.
        namespace: the namespaces whose policies were checked.
        now: the time of the report.

    Returns:
        The Markdown file.

    Raises:
        OSError: a file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    moment = now.isoformat(timespec="seconds")
    file = directory / f"egress-{now:%Y%m%dT%H%M%SZ}.md"
    records = [
        {**asdict(row), "time": row.time.isoformat(timespec="seconds"), "as_expected": row.is_as_expected}
        for row in rows
    ]
    head = {"time": moment, "cluster": cluster, "namespace": namespace, "as_expected": all(map(_as_expected, rows))}
    file.with_suffix(".json").write_text(json.dumps({**head, "rows": records}, indent=2) + "\n", encoding="utf-8")
    wrong = [row for row in rows if not row.is_as_expected]
    lines = [
        f"# Egress of {namespace}, {moment}",
        "",
        f"`cloister doctor` tried {len(rows)} TCP connections in the cluster {cluster}. "
        + (f"**{len(wrong)} differ from the policies.**" if wrong else "All are as the policies demand."),
        "",
        (
            "`open`: connected. `refused`: reset at once, by a policy or by the destination. `no answer`: nothing in "
            "3 s. `unreachable`: no route, or rejected. `no address`: the name was not resolved. The last column is "
            "the same connection from a pod without policies: `open` there and not here proves that a policy closed it."
        ),
        "",
        "| from | to | address | expected | found | as expected | time | seconds | without policies |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        verdict = "yes" if row.is_as_expected else "**no**"
        when = row.time.isoformat(timespec="seconds")
        lines.append(
            f"| {row.source} | {row.destination.name} | {row.destination.place} | {row.expected} | {row.found} "
            f"| {verdict} | {when} | {row.seconds} | {row.without_policies} |"
        )
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def _as_expected(row: Row) -> bool:
    return row.is_as_expected
