"""Node pools of EKS Auto Mode, from zero: one NodeClass and one NodePool for each pool of the stack file.

Fields: https://docs.aws.amazon.com/eks/latest/userguide/create-node-class.html and create-node-pool.html there. Nodes
of Auto Mode run Bottlerocket with NVIDIA's driver and device plugin and the agent of Pod Identity; nobody can log in,
and instance metadata needs a token and is out of reach for pods
(https://docs.aws.amazon.com/eks/latest/userguide/automode-learn-instances.html). AWS replaces each node after at most
21 days, and warns a node whose spot instance it takes away.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pulumi
from pulumi_aws import ec2
from pulumi_kubernetes import apiextensions, core, meta

from infra.capacity.instance_types import InstanceType
from infra.capacity.pools import NodePool
from infra.kubernetes.naming import StackNames
from infra.stack_file.aws import AwsPoolSection, AwsSection

_DISK: Final = "200Gi"
"""Disk of a node: images, weights that are copied to it, and temporary files."""
_COMPONENT: Final = "node-pools"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeArgs:
    """Settings that all nodes share.

    Attributes:
        names: names of the stack.
        role: name of the role of nodes.
        subnet_ids: subnets, one in each zone.
        security_group_id: security group of nodes.
        key_arn: key of their disks.
        zones: the zones.
    """

    names: StackNames
    role: pulumi.Input[str]
    subnet_ids: Sequence[pulumi.Input[str]]
    security_group_id: pulumi.Input[str]
    key_arn: pulumi.Input[str]
    zones: Sequence[str]


class AwsNodePools(pulumi.ComponentResource):
    """The node pools, and the setting that makes nodes enforce network policies.

    Attributes:
        resources: what pods need before they start.

    Args:
        name: logical name of the component.
        args: what all nodes have in common.
        pools: the pools with the types of their instances.
        aws: the section of the stack file.
        opts: options of the component.
    """

    resources: tuple[pulumi.Resource, ...]

    def __init__(
        self,
        name: str,
        args: NodeArgs,
        pools: Mapping[str, tuple[NodePool, tuple[InstanceType, ...], pulumi.Output[list[str]]]],
        aws: AwsSection,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        # Not cloister:aws, the target of a first run that does not reach the cluster yet (docs/how-to/aws.md).
        super().__init__("cloister:aws_nodes:NodePools", name, None, opts)
        # https://docs.aws.amazon.com/eks/latest/userguide/auto-net-pol.html
        enforced = core.v1.ConfigMap(
            "amazon-vpc-cni",
            metadata=meta.v1.ObjectMetaArgs(
                name="amazon-vpc-cni", namespace="kube-system", labels=args.names.labels(_COMPONENT)
            ),
            data={"enable-network-policy-controller": "true"},
            opts=pulumi.ResourceOptions(parent=self),
        )
        created: list[pulumi.Resource] = [enforced]
        for pool, types, offered in pools.values():
            bought = aws.pools.get(pool.name, AwsPoolSection())
            metadata: Any = {"name": f"cloister-{pool.name}", "labels": args.names.labels(_COMPONENT)}
            node_class = apiextensions.CustomResource(
                f"node-class-{pool.name}",
                api_version="eks.amazonaws.com/v1",
                kind="NodeClass",
                metadata=metadata,
                spec=node_class_spec(args, bought),
                opts=pulumi.ResourceOptions(parent=self, depends_on=[enforced]),
            )
            node_pool = apiextensions.CustomResource(
                f"node-pool-{pool.name}",
                api_version="karpenter.sh/v1",
                kind="NodePool",
                metadata=metadata,
                spec=node_pool_spec(args, pool, bought, types, offered),
                opts=pulumi.ResourceOptions(parent=self, depends_on=[node_class]),
            )
            created += [node_class, node_pool]
        self.resources = tuple(created)
        self.register_outputs({})


def node_class_spec(args: NodeArgs, bought: AwsPoolSection) -> dict[str, Any]:
    """Return the spec of a NodeClass. A pod without a network policy has no connection, also while it starts."""
    reservations = [{"id": reservation} for reservation in bought.reservations]
    return {
        "role": args.role,
        "subnetSelectorTerms": [{"id": subnet} for subnet in args.subnet_ids],
        "securityGroupSelectorTerms": [{"id": args.security_group_id}],
        "networkPolicy": "DefaultDeny",
        "networkPolicyEventLogs": "Enabled",
        "ephemeralStorage": {"size": _DISK, "kmsKeyID": args.key_arn},
        **({"capacityReservationSelectorTerms": reservations} if reservations else {}),
    }


def node_pool_spec(
    args: NodeArgs,
    pool: NodePool,
    bought: AwsPoolSection,
    types: Sequence[InstanceType],
    offered: pulumi.Input[list[str]],
) -> dict[str, Any]:
    """Return the spec of a NodePool. Nodes of jobs end only when they are empty."""
    largest = max(each.vcpus for each in types)
    limits = {"cpu": str(pool.max_nodes * largest)}
    if pool.gpus_per_node:
        limits[pool.accelerator.resource] = str(pool.max_nodes * pool.gpus_per_node)

    def one_of(key: str, values: pulumi.Input[list[str]]) -> dict[str, Any]:
        return {"key": key, "operator": "In", "values": values}

    return {
        "template": {
            "metadata": {"labels": pool.labels},
            "spec": {
                "nodeClassRef": {"group": "eks.amazonaws.com", "kind": "NodeClass", "name": f"cloister-{pool.name}"},
                "requirements": [
                    one_of("node.kubernetes.io/instance-type", offered),
                    one_of("karpenter.sh/capacity-type", [bought.capacity]),
                    one_of("topology.kubernetes.io/zone", list(args.zones)),
                    one_of("kubernetes.io/arch", ["amd64"]),
                ],
                "taints": pool.taints,
                "expireAfter": "336h",
            },
        },
        "limits": limits,
        "disruption": {
            "consolidationPolicy": "WhenEmptyOrUnderutilized" if pool.name == "system" else "WhenEmpty",
            "consolidateAfter": "5m",
            "budgets": [{"nodes": "1"}],
        },
    }


def offered_types(
    pool: NodePool, types: Sequence[InstanceType], aws: AwsSection, provider: pulumi.ProviderResource
) -> pulumi.Output[list[str]]:
    """Return the instance types of a pool that AWS offers in one of the zones. The preview asks AWS.

    Raises:
        pulumi.RunError: AWS offers none of them; raised by the output.
    """
    names = [each.name for each in types]
    found = ec2.get_instance_type_offerings_output(
        filters=[{"name": "instance-type", "values": names}, {"name": "location", "values": aws.zones}],
        location_type="availability-zone",
        opts=pulumi.InvokeOutputOptions(provider=provider),
    )

    def checked(offered: Sequence[str]) -> list[str]:
        usable = [name for name in names if name in offered]
        if not usable:
            raise pulumi.RunError(
                f"cloister:node_pools.{pool.name}: AWS offers {' and '.join(names)} in none of {', '.join(aws.zones)}; "
                f"`aws ec2 describe-instance-type-offerings --location-type region --region {aws.region} --filters "
                f"Name=instance-type,Values={','.join(names)}` asks for the region. Use other zones or another region"
            )
        return usable

    result: pulumi.Output[list[str]] = found.instance_types.apply(checked)
    return result
