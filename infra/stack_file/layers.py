"""Layers of a stack: which keys of a stack file belong to which layer."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, get_args

from infra.capacity.pools import NodePool
from infra.stack_file.cluster_sections import CustomerSection

Layer = Literal["platform", "customer", "all"]
_LAYERS: Final[tuple[Layer, ...]] = get_args(Layer)
# Everything else belongs to a customer's service, so to the layers `customer` and `all`.
_LAYERS_OF_KEYS: Final[Mapping[str, tuple[Layer, ...]]] = {
    **dict.fromkeys(
        (
            *("layer", "kubernetes", "network", "images", "accelerators", "node_pools", "transport", "policy"),
            *("kubeconfig", "registry_password"),
        ),
        _LAYERS,
    ),
    **dict.fromkeys(("hosts", "aws", "ssh_private_key", "device_plugin", "kuberay"), ("platform", "all")),
    "customers": ("platform",),
    **dict.fromkeys(("platform", "isolation"), ("customer",)),
}


def layer_of(values: Mapping[str, Any]) -> Layer:
    """Return the layer of a stack file; ``all`` if the key is missing or wrong, which validation reports."""
    return next((layer for layer in _LAYERS if layer == values.get("layer")), "all")


def is_in_layer(name: str, layer: Layer) -> bool:
    """Return whether a key of a stack file belongs to a layer."""
    return layer in _LAYERS_OF_KEYS.get(name, ("customer", "all"))


def layer_problems(values: Mapping[str, Any], known: Sequence[str], layer: Layer) -> Iterator[str]:
    """Yield the keys that belong to other layers, as ``key: what is wrong; what to do``.

    Args:
        values: the stack file, by key without the project.
        known: all keys that a stack file can have.
        layer: the layer of the stack.
    """
    for name in values:
        if name in known and not is_in_layer(name, layer):
            others = _LAYERS_OF_KEYS.get(name, ("customer", "all"))
            yield (
                f"{name}: does not belong to layer {layer}; remove it, or set layer to {' or '.join(others)} "
                "(docs/how-to/platform.md)"
            )
    pools = values.get("node_pools")
    if layer == "customer" and isinstance(pools, Mapping) and "manage_nodes" in pools:
        yield (
            "node_pools.manage_nodes: does not belong to layer customer; remove it: the stack of the platform manages "
            "the nodes"
        )
    if layer == "customer" and "platform" not in values:
        yield "platform: is required in layer customer: set platform.stack, or platform.kuberay_namespace"
    platform = values.get("platform")
    if layer == "customer" and isinstance(platform, Mapping):
        given = [name for name in ("stack", "kuberay_namespace") if platform.get(name)]
        if len(given) != 1:
            yield "platform: must have one of stack and kuberay_namespace, which is an output of the platform's stack"


def customer_problems(customers: Sequence[CustomerSection], pools: Mapping[str, NodePool]) -> Iterator[str]:
    """Yield contradictions between the customers of a platform and its nodes.

    Args:
        customers: the section ``customers``.
        pools: the pools by name; empty if they are wrong.
    """
    nodes = {node for pool in pools.values() for node in pool.nodes}
    seen: dict[str, int] = {}
    owners: dict[str, str] = {}
    for index, each in enumerate(customers):
        first = seen.setdefault(each.names.instance, index)
        if first != index:
            yield f"customers[{index}]: is the same stack as customers[{first}]; remove one of the two"
        for node in each.nodes:
            if pools and node not in nodes:
                yield f"customers[{index}].nodes: no pool has the node {node}; add it to a pool in node_pools"
            if owners.setdefault(node, each.customer) != each.customer:
                yield f"customers[{index}].nodes: {node} belongs to {owners[node]}; give a node to one customer"
