"""Rules between a stack file and the others of the same directory that name the same cluster.

Neighbours are compared as they are written, right or wrong: only a few of their keys matter here.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from infra.stack_file.layers import layer_of

Values = Mapping[str, Any]

_HOSTS: Final = ("api.ingress.host", "api.gateway.host")
_ONCE: Final = (
    ("node_pools.manage_nodes", "manages the nodes", True, True),
    ("kuberay.install", "installs KubeRay", "helm", "helm"),
    ("device_plugin.install", "installs the device plugin", True, False),
)
"""Key, meaning of the value that only one stack of a cluster may have, that value, default."""


def neighbour_problems(values: Values, neighbours: Mapping[str, Values]) -> Iterator[str]:
    """Yield what a stack shares with another one of its cluster, as ``key: what is wrong; what to do``.

    Args:
        values: the stack file, by key without the project.
        neighbours: the other stack files by stack.
    """
    context = _at(values, "kubernetes.context")
    for stack, other in sorted(neighbours.items()):
        if context is None or _at(other, "kubernetes.context") != context:
            continue
        yield from _platform_problems(values, stack, other)
        if "customer" in values and all(_at(values, key) == _at(other, key) for key in ("customer", "environment")):
            yield f"customer: Pulumi.{stack}.yaml has the same customer and environment; each stack needs its own"
        if _at(values, "hosts") and _at(other, "hosts"):
            yield f"hosts: Pulumi.{stack}.yaml makes the cluster already; leave the section out, and use its kubeconfig"
        taken = {_at(other, key) for key in _HOSTS} - {None}
        for key in _HOSTS:
            if (host := _at(values, key)) in taken:
                yield f"{key}: Pulumi.{stack}.yaml has {host} too; each stack needs its own"
        layers = {layer_of(values), layer_of(other)}
        for key, meaning, exclusive, default in _ONCE if "customer" not in layers else ():
            if _at(values, key, default) == exclusive == _at(other, key, default):
                otherwise = "none" if exclusive == "helm" else "false"
                yield f"{key}: Pulumi.{stack}.yaml {meaning} already; set {otherwise} in one of the two"
        bucket, prefix = _bucket(values)
        other_bucket, other_prefix = _bucket(other)
        if bucket and bucket == other_bucket and (prefix.startswith(other_prefix) or other_prefix.startswith(prefix)):
            yield f"object_store.prefix: overlaps with that of Pulumi.{stack}.yaml; each stack needs its own"
        key = _at(values, "object_store.access_key_id")
        if key is not None and key == _at(other, "object_store.access_key_id"):
            yield f"object_store.access_key_id: Pulumi.{stack}.yaml has it too; each stack needs its own key"
        server, database, roles = _database(values)
        other_server, other_database, other_roles = _database(other)
        if not server or server != other_server:
            continue
        if database == other_database:
            yield f"database.url: is the database of Pulumi.{stack}.yaml; each stack needs its own"
        for role, key in roles.items():
            if role in other_roles:
                yield f"{key}: shares the role {role} with Pulumi.{stack}.yaml; use another one"


def _platform_problems(values: Values, stack: str, other: Values) -> Iterator[str]:
    """Yield contradictions between a stack and another one that is its platform, or installs KubeRay for itself."""
    layer, other_layer = layer_of(values), layer_of(other)
    own = {key: _at(values, key) for key in ("customer", "environment")}
    customers = _at(other, "customers", [])
    if (layer, other_layer) == ("customer", "platform") and isinstance(customers, list):
        listed = [each for each in customers if isinstance(each, Mapping)]
        if not any(all(each.get(key) == value for key, value in own.items()) for each in listed):
            yield (
                f"customer: Pulumi.{stack}.yaml, the platform of this cluster, lacks customer {own['customer']}, "
                f"environment {own['environment']}; add it to customers there"
            )
    installs = other_layer == "all" and _at(other, "kuberay.install", "helm") == "helm"
    if installs and (layer == "customer" or (layer == "all" and _at(values, "kuberay.install") == "none")):
        yield (
            f"layer: the KubeRay of Pulumi.{stack}.yaml runs jobs of its own stack only; move it to a stack of layer "
            "platform (docs/how-to/platform.md)"
        )


def _bucket(values: Values) -> tuple[tuple[Any, Any] | None, str]:
    """Return the bucket and the stack's prefix in it; None for the bundled store."""
    bucket = _at(values, "object_store.bucket")
    prefix = _at(values, "object_store.prefix") or f"{_at(values, 'customer')}/{_at(values, 'environment')}"
    return (_at(values, "object_store.endpoint_url"), bucket) if bucket else None, f"{str(prefix).strip('/')}/"


def _database(values: Values) -> tuple[str, str, dict[str, str]]:
    """Return server, database and roles of an external database, with the key of each role; empty for another one."""
    url = _at(values, "database.url")
    if not isinstance(url, str):
        return "", "", {}
    parts = urlsplit(url)
    server = f"{parts.hostname}:{parts.port or 5432}"
    service_role = _at(values, "database.service_role")
    roles = {str(service_role): "database.service_role"} if service_role else {}
    return server, parts.path, roles | {str(parts.username): "database.url"}


def _at(values: Any, path: str, default: Any = None) -> Any:
    for key in path.split("."):
        if not isinstance(values, Mapping) or key not in values:
            return default
        values = values[key]
    return values
