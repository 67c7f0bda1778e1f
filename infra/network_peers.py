"""The ends of a flow, and the flow itself. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Protocol = Literal["TCP", "UDP"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """Pods of the stack: in one of its namespaces, by their labels."""

    name: str
    namespace: str
    labels: Mapping[str, str] = field(hash=False)

    def selectors(self) -> list[dict[str, Any]]:
        """The peers of a NetworkPolicy's rule."""
        return [
            {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self.namespace}},
                "podSelector": {"matchLabels": dict(self.labels)},
            }
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherNamespace:
    """All pods of a namespace that is not the stack's."""

    name: str
    namespace: str

    def selectors(self) -> list[dict[str, Any]]:
        """The peers of a NetworkPolicy's rule."""
        return [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self.namespace}}}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """Addresses that are no pods, in CIDR notation."""

    name: str
    cidrs: tuple[str, ...]

    def selectors(self) -> list[dict[str, Any]]:
        """The peers of a NetworkPolicy's rule."""
        return [{"ipBlock": {"cidr": cidr}} for cidr in self.cidrs]


Peer = Pods | OtherNamespace | Networks


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Connections that are allowed.

    Attributes:
        source: who opens them.
        target: who answers.
        ports: the target's ports; empty for all of them.
        why: what they are for, in a few words.
        protocols: of the ports.
    """

    source: Peer
    target: Peer
    ports: tuple[int, ...]
    why: str
    protocols: tuple[Protocol, ...] = ("TCP",)

    def port_list(self) -> dict[str, Any]:
        """The ``ports`` of a NetworkPolicy's rule; nothing for all of them."""
        ports = [{"port": port, "protocol": protocol} for port in self.ports for protocol in self.protocols]
        return {"ports": ports} if ports else {}
