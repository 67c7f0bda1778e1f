"""Labels and taints of the cluster's existing nodes, which the stack file names."""

from collections.abc import Mapping, Sequence
from typing import Any

import pulumi
from pulumi_kubernetes import core

from infra.capacity.pools import NodePool, of_customer
from infra.kubernetes.naming import StackNames


def node_patch(pool: NodePool, node: str, *, field_manager: str) -> dict[str, Any]:
    """Return the fields of a node that the stack sets by server-side apply; it leaves all other fields alone.

    The list of taints has one field manager. If another one has set taints, the API server rejects the patch with a
    conflict and changes nothing. After Kubernetes has tainted a node that was offline, its node controller is the
    manager: then the taint of the pool stays when the stack is destroyed.

    Args:
        pool: the node's pool.
        node: the node's name.
        field_manager: owner of the fields at the API server, which removes them with the patch.
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
    """One patch for each node, named after the node: a node that moves to another pool is patched in place.

    Exactly one stack of a cluster manages nodes.

    Args:
        name: logical name of the component.
        names: names of the stack.
        pools: the pools whose nodes the stack manages.
        owners: the customers of nodes that customers do not share, by node.
        opts: options of the component.
    """

    resources: tuple[pulumi.Resource, ...]

    def __init__(
        self,
        name: str,
        *,
        names: StackNames,
        pools: Sequence[NodePool],
        owners: Mapping[str, str],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("cloister:node_pools:NodePools", name, None, opts)
        manager = names.cluster_scoped("nodes")
        self.resources = tuple(
            core.v1.NodePatch(
                f"node-{node}",
                **node_patch(of_customer(pool, owners.get(node, "")), node, field_manager=manager),
                opts=pulumi.ResourceOptions(parent=self),
            )
            for pool in pools
            for node in pool.nodes
        )
        self.register_outputs({})
