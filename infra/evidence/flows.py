"""Connections that a stack's network policies allow, and their drawing."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

from infra.rendering.manifests import Manifest

Flow = dict[str, str]
"""A flow: ``from``, ``to``, ``ports`` and the ``policy`` that allows it."""

_KINDS: Final = ("NetworkPolicy", "CiliumNetworkPolicy")
_COMPONENT: Final = "app.kubernetes.io/component"
_NAMESPACE: Final = "kubernetes.io/metadata.name"
_ROW: Final = 26
_WIDTH: Final = 1_000
_LEFT: Final = 320
_RIGHT: Final = 680


def flows_of(manifests: Sequence[Manifest]) -> list[Flow]:
    """Return the flows that network policies allow, each once, in alphabetical order."""
    found = {
        (source, target, ports, manifest.title)
        for manifest in manifests
        if manifest.kind in _KINDS
        for source, target, ports in _of_policy(manifest)
    }
    return [
        {"from": source, "to": target, "ports": ports, "policy": title}
        for source, target, ports, title in sorted(found)
    ]


def _of_policy(manifest: Manifest) -> Iterator[tuple[str, str, str]]:
    spec: dict[str, Any] = manifest.body.get("spec") or {}
    selector = spec.get("podSelector") or spec.get("endpointSelector") or {}
    own = f"{manifest.namespace}/{_pods(selector) or _words(spec.get('selector'))}"
    for direction, side, field in (("ingress", "from", "source"), ("egress", "to", "destination")):
        for rule in spec.get(direction) or ():
            if "action" in rule:  # Calico
                peers, ports = [_words(rule.get(field))], "all"
            else:
                named = {key: value for key, value in rule.items() if key.startswith(side) and key != "toPorts"}
                plain = [_peer(each, manifest.namespace) for each in named.pop(side, ())]
                peers = plain + [f"{key[len(side) :]} {_words(value)}" for key, value in named.items()]
                inner = [port for each in rule.get("toPorts") or () for port in each.get("ports") or ()]
                numbers = {str(port.get("port", "all")) for port in (*(rule.get("ports") or ()), *inner)}
                ports = ", ".join(sorted(numbers)) or "all"
            for peer in peers or ["everything"]:
                yield (peer, own, ports) if direction == "ingress" else (own, peer, ports)


def _peer(peer: Mapping[str, Any], namespace: str) -> str:
    if "ipBlock" in peer:
        return str(peer["ipBlock"].get("cidr"))
    labels = (peer.get("namespaceSelector") or {}).get("matchLabels") or {}
    place = labels.get(_NAMESPACE) or (_words(labels) if "namespaceSelector" in peer else namespace)
    return f"{place or 'every namespace'}/{_pods(peer.get('podSelector') or {})}"


def _pods(selector: Mapping[str, Any]) -> str:
    labels = selector.get("matchLabels") or {}
    return str(labels.get(_COMPONENT) or _words(labels) or "every pod")


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return str(value or "")


def drawing(flows: Sequence[Flow]) -> str:
    """Return an SVG picture of flows: sources on the left, targets on the right, a line with its ports for each."""
    sources, targets = (list(dict.fromkeys(flow[end] for flow in flows)) for end in ("from", "to"))
    height = _ROW * (max(len(sources), len(targets), 1) + 2)
    places = [{name: _ROW * (index + 2) for index, name in enumerate(names)} for names in (sources, targets)]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        "<title>Connections that the network policies allow</title>",
        f'<text x="{_LEFT}" y="{_ROW - 4}" text-anchor="end" font-weight="bold">from</text>',
        f'<text x="{_RIGHT}" y="{_ROW - 4}" font-weight="bold">to</text>',
    ]
    for flow in flows:
        start, end = places[0][flow["from"]], places[1][flow["to"]]
        label = end - 6 + (start - end) * 54 / (_RIGHT - _LEFT)
        lines += [
            f'<line x1="{_LEFT + 6}" y1="{start - 4}" x2="{_RIGHT - 6}" y2="{end - 4}" stroke="#557" />',
            f'<text x="{_RIGHT - 60}" y="{label:.0f}" font-size="9">{escape(flow["ports"])}</text>',
        ]
    for column, x, anchor in ((places[0], _LEFT, "end"), (places[1], _RIGHT, "start")):
        style = f'text-anchor="{anchor}" font-size="11"'
        lines += [f'<text x="{x}" y="{y}" {style}>{escape(name)}</text>' for name, y in column.items()]
    return "\n".join([*lines, "</svg>", ""])
