"""Labels and taints of the nodes that a cluster has already, by their names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pulumi
from pulumi_kubernetes import core

from infra.naming import StackNames
from infra.pools import NodePool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePoolsArgs:
    """The pools whose nodes this stack looks after. Exactly one stack of a cluster does."""

    names: StackNames
    pools: Sequence[NodePool]


def node_patch(pool: NodePool, node: str, *, field_manager: str) -> dict[str, Any]:
    """What the stack says of a node, by server-side apply; everything else of the node is left alone.

    Taints are one list, which has one manager: where somebody else has set taints, the API server refuses this with a
    conflict, and nothing is changed. Once Kubernetes has tainted a node that was away, its node controller is the
    manager: the taint of the pool stays when the stack goes.

    Args:
        pool: the node's pool.
        node: the node's name.
        field_manager: under which the API server notes the fields; when it leaves, they go.
    """
    return {
        "metadata": {
            "name": node,
            "labels": pool.labels,
            "annotations": {"pulumi.com/patchFieldManager": field_manager},
        },
        **({"spec": {"taints": pool.taints}} if pool.taints else {}),
    }


class NodePools(pulumi.ComponentResource):
    """One patch for each node, named after the node: a node that goes to another pool is patched in place."""

    made: tuple[pulumi.Resource, ...]

    def __init__(self, name: str, args: NodePoolsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:node_pools:NodePools", name, None, opts)
        manager = args.names.cluster_scoped("nodes")
        self.made = tuple(
            core.v1.NodePatch(
                f"node-{node}",
                **node_patch(pool, node, field_manager=manager),
                opts=pulumi.ResourceOptions(parent=self),
            )
            for pool in args.pools
            for node in pool.nodes
        )
        self.register_outputs({})
