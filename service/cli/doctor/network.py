"""Names and ways as a pod of the stack has them: what it must reach it finds, what it must not reach stays shut.

Connections are tried inside the cluster and to the link-local address of a cloud's metadata only.
"""

import ipaddress
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final
from urllib.parse import urlsplit

from psycopg.conninfo import conninfo_to_dict

from service.cli.doctor.findings import Finding, failed, not_checked, ok
from service.settings import Settings

_TIMEOUT_S: Final = 3.0
_METADATA: Final = "169.254.169.254"
_KUBERNETES: Final = "kubernetes.default.svc"


class Way(Enum):
    """How a connection went: made, refused at once, no answer, or the name is not known."""

    OPEN = auto()
    REFUSED = auto()
    SILENT = auto()
    NO_NAME = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shut:
    """An address that the network policies keep this pod from.

    Attributes:
        name: what is there.
        host: its name or address.
        port: its TCP port.
        if_open: what else than policies that nothing enforces an open way can mean.
        if_shut: what else than policies that are enforced a shut way can mean; empty where nothing else can.
    """

    name: str
    host: str
    port: int
    if_open: str = ""
    if_shut: str = ""


def names(settings: Settings, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the names in the settings lead to addresses."""
    hosts: dict[str, str] = {}
    for setting, url in (
        ("CLOISTER_DATABASE_URL", settings.database_url),
        ("CLOISTER_JOB_DATABASE_URL", settings.job_database_url),
    ):
        for host in str(conninfo_to_dict(url).get("host") or "").split(","):
            hosts[host] = setting
    hosts[urlsplit(settings.object_store.endpoint_url).hostname or ""] = "CLOISTER_OBJECT_STORE"
    if "KUBERNETES_SERVICE_HOST" in environment:
        hosts[_KUBERNETES] = "the cluster's own"
    for host, setting in hosts.items():
        if host and not host.startswith("/") and not _is_address(host):
            yield _name(host, setting)


def _name(host: str, setting: str) -> Finding:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "that is no name"
        return failed(
            "DNS",
            f"{host} ({setting}): {reason}. See that the name is right, that the cluster's DNS runs in "
            "`network.dns_namespace`, and that a cache on the nodes is in `network.dns_networks`",
        )
    return ok("DNS", f"{host} ({setting}) is {', '.join(sorted({str(each[4][0]) for each in found}))}")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def shut(environment: Mapping[str, str]) -> list[Shut]:
    """What the policies keep this pod from; nothing outside of a cluster.

    The reconciler may reach the Kubernetes API and not the API's pods; the API's pods may not reach the Kubernetes API.
    """
    server = environment.get("KUBERNETES_SERVICE_HOST", "")
    if not server:
        return []
    metadata = Shut(name="a cloud's metadata", host=_METADATA, port=80, if_shut="this is no cloud")
    if environment.get("CLOISTER_LAUNCHER"):
        return [Shut(name="the Service api", host="api", port=80, if_shut="no pod of it is ready"), metadata]
    port = int(environment.get("KUBERNETES_SERVICE_PORT", "443"))
    node = "the API server runs on this pod's own node, which no policy can shut"
    return [Shut(name="the Kubernetes API", host=server, port=port, if_open=node), metadata]


def policies(targets: list[Shut]) -> Iterator[Finding]:
    """Whether something enforces the network policies: no way may lead where they leave none."""
    if not targets:
        yield not_checked("network policies", "this is no pod of a cluster (KUBERNETES_SERVICE_HOST is not set)")
    for target in targets:
        yield judge(target, way_to(target.host, target.port))


def judge(target: Shut, way: Way) -> Finding:
    """What a way says of the policies."""
    check, where = "network policies", f"{target.name} at {target.host}:{target.port}"
    match way:
        case Way.OPEN:
            also = f" (or {target.if_open})" if target.if_open else ""
            return failed(
                check,
                f"network policies are not enforced: this pod reaches {where}, which they leave shut{also}. Take a "
                "network plugin that enforces NetworkPolicy, or switch that on",
            )
        case Way.NO_NAME:
            return not_checked(check, f"there is no name {target.host}: see the lines on DNS")
        case Way.REFUSED if target.if_shut:
            return not_checked(check, f"{where} refuses at once: a policy makes it so, or {target.if_shut}")
        case _:
            also = f" (or {target.if_shut})" if target.if_shut else ""
            return ok(check, f"no way to {where}, as they say{also}")


def way_to(host: str, port: int, *, timeout_s: float = _TIMEOUT_S) -> Way:
    """Tries a TCP connection, and sends nothing on it."""
    try:
        connection = socket.create_connection((host, port), timeout=timeout_s)
    except (socket.gaierror, UnicodeError):
        return Way.NO_NAME
    except ConnectionRefusedError:
        return Way.REFUSED
    except OSError:
        return Way.SILENT  # no answer in time, no route, or not permitted
    with closing(connection):
        return Way.OPEN
