"""The stack files beside this one that go to the same cluster: what two stacks must not have in common. Pure.

A stack file is checked against its neighbours as they are written, right or wrong: what they say of these few keys is
enough.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

Values = Mapping[str, Any]

_ONCE: Final = (
    ("node_pools.manage_nodes", "looks after the nodes", True, True),
    ("kuberay.install", "installs KubeRay", "helm", "helm"),
    ("device_plugin.install", "installs the device plugin", True, False),
)
"""Key, what it does, the value that does it, the default."""


def neighbour_problems(values: Values, neighbours: Mapping[str, Values]) -> Iterator[str]:
    """What a stack shares with another of its cluster, as ``key: what is wrong; what to do``.

    Args:
        values: of the stack file, by key without the project.
        neighbours: the same of the other stack files, by stack.
    """
    context = _at(values, "kubernetes.context")
    for stack, other in sorted(neighbours.items()):
        if context is None or _at(other, "kubernetes.context") != context:
            continue
        yield from _names(values, other, stack)
        yield from _platform(values, other, stack)
        yield from _stores(values, other, stack)


def _names(values: Values, other: Values, stack: str) -> Iterator[str]:
    keys = ("customer", "environment")
    if all(_at(values, key) == _at(other, key) for key in keys):
        yield f"customer: customer and environment are those of Pulumi.{stack}.yaml; each stack has its own"
    host = _at(values, "api.ingress.host")
    if host is not None and host == _at(other, "api.ingress.host"):
        yield f"api.ingress.host: {host} is in Pulumi.{stack}.yaml too; each stack has its own"


def _platform(values: Values, other: Values, stack: str) -> Iterator[str]:
    for key, meaning, does, default in _ONCE:
        if _at(values, key, default) == does == _at(other, key, default):
            otherwise = "none" if does == "helm" else "false"
            yield f"{key}: Pulumi.{stack}.yaml {meaning} already, and a cluster has that once; set {otherwise} in one"


def _stores(values: Values, other: Values, stack: str) -> Iterator[str]:
    if _bucket(values) and _bucket(values) == _bucket(other) and _overlap(_prefix(values), _prefix(other)):
        yield f"object_store.prefix: lies in that of Pulumi.{stack}.yaml, or that in this; each stack has its own"
    key = _at(values, "object_store.access_key_id")
    if key is not None and key == _at(other, "object_store.access_key_id"):
        yield f"object_store.access_key_id: is that of Pulumi.{stack}.yaml; a key reaches one stack's objects only"
    mine, theirs = _database(values), _database(other)
    if mine is None or theirs is None or mine[0] != theirs[0]:
        return
    if mine[1] == theirs[1]:
        yield f"database.url: is the database of Pulumi.{stack}.yaml; each stack has its own"
    if shared := mine[2] & theirs[2]:
        yield f"database.url: shares the role {', '.join(sorted(shared))} with Pulumi.{stack}.yaml; each has two"


def _bucket(values: Values) -> tuple[Any, Any] | None:
    bucket = _at(values, "object_store.bucket")
    return (_at(values, "object_store.endpoint_url"), bucket) if bucket else None


def _prefix(values: Values) -> str:
    prefix = _at(values, "object_store.prefix") or f"{_at(values, 'customer')}/{_at(values, 'environment')}"
    return f"{str(prefix).strip('/')}/"


def _overlap(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _database(values: Values) -> tuple[str, str, set[str]] | None:
    """Server, database and roles of an external database."""
    url = _at(values, "database.url")
    if not isinstance(url, str):
        return None
    parts = urlsplit(url)
    server = f"{parts.hostname}:{parts.port or 5432}"
    return server, parts.path, {str(parts.username), str(_at(values, "database.job_role"))}


def _at(values: Any, path: str, default: Any = None) -> Any:
    for key in path.split("."):
        if not isinstance(values, Mapping) or key not in values:
            return default
        values = values[key]
    return values
