"""Section of a stack file about AWS, and the rules inside it and between it and others.

The program makes a VPC without a route to the internet, and an EKS cluster with Auto Mode in it (ADR 17).
"""

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from infra.capacity.instance_types import INSTANCE_TYPES, InstanceType, instance_types_of, smallest_fitting
from infra.stack_file.values import Cidr, Cidrs, matching
from service.config_sections import Section, key

if TYPE_CHECKING:
    from infra.capacity.pools import NodePool
    from infra.stack_file.cluster_sections import (
        DevicePluginSection,
        ImagesSection,
        KubernetesSection,
        NetworkSection,
    )

SERVICE_CIDR: Final = "172.20.0.0/16"
"""Addresses of Services. EKS picks this network or 10.100.0.0/16 if none is given, so it is stated."""
CLUSTER_DNS: Final = "172.20.0.10"
"""Address of the cluster's DNS: EKS gives it the tenth address of the Services' network."""
POD_IDENTITY_AGENT: Final = "169.254.170.23/32"
"""Address of EKS Pod Identity's agent on each node, which answers on port 80:
https://docs.aws.amazon.com/eks/latest/userguide/pod-id-how-it-works.html."""
_ZONES: Final = 3
_SubnetKind = Literal["nodes", "control-plane", "endpoints", "database"]
_SMALL_KINDS: Final[tuple[_SubnetKind, ...]] = ("control-plane", "endpoints", "database")

AccountId = Annotated[str, AfterValidator(matching(r"\d{12}", "must be 12 digits in quotes: an AWS account id"))]
RoleArn = Annotated[
    str,
    AfterValidator(
        matching(
            r"arn:aws(-[a-z-]+)?:iam::\d{12}:(role|user)/[\w+=,.@/-]+",
            "must be the ARN of an IAM role or user, e.g. arn:aws:iam::123456789012:role/cloister-operator",
        )
    ),
]
Region = Annotated[
    str, AfterValidator(matching(r"[a-z]{2}(-[a-z]+)+-\d", "must be the name of a region, e.g. eu-central-1"))
]


def resource_id(prefix: str) -> AfterValidator:
    """Return a check of the id of an EC2 resource.

    Args:
        prefix: what the id begins with; a regular expression.
    """
    names = prefix.strip("()").replace("|", "-, ")
    return AfterValidator(matching(rf"{prefix}-[0-9a-f]{{8,17}}", f"must be an id that begins with {names}-"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSubnet:
    """One private subnet.

    Attributes:
        kind: what is in it. In an existing VPC a subnet has several kinds.
        zone: availability zone.
        cidr: addresses.
        id: id of an existing subnet; empty for one to create.
    """

    kind: _SubnetKind
    zone: str
    cidr: str
    id: str = ""


class ExistingSubnetSection(Section):
    """A private subnet of an existing VPC."""

    id: Annotated[str, resource_id("subnet")] = key("its id", "subnet-0123456789abcdef0")
    zone: str = key("its availability zone", "eu-central-1a")
    cidr: Cidr = key("its addresses", "10.64.0.0/18")


class ExistingVpcSection(Section):
    """A VPC that exists, with a private subnet in each zone. Its owner keeps its routes, flow logs and attachments."""

    id: Annotated[str, resource_id("vpc")] = key("id of the VPC", "vpc-0123456789abcdef0")
    subnets: Annotated[list[ExistingSubnetSection], Field(min_length=_ZONES, max_length=_ZONES)] = key(
        "one private subnet in each zone; see below", []
    )
    create_endpoints: bool = key(
        "create the endpoints of AWS services; `false` if the VPC has all of them (docs/how-to/aws.md)",
        False,
        default=True,
    )


class VpcSection(Section):
    """The network. Give one of the keys."""

    cidr: Cidr | None = key("addresses of a new VPC, from /16 to /20", "10.64.0.0/16", default=None)
    existing: ExistingVpcSection | None = key("see below", {}, default=None)


class AttachmentSection(Section):
    """A way from the new VPC to other private networks, such as the one of the machine that runs `pulumi up`."""

    id: Annotated[str, resource_id("(tgw|pcx|vgw)")] = key(
        "a transit gateway (`tgw-`) or a virtual private gateway of a VPN or Direct Connect (`vgw-`), to which the VPC "
        "is attached; or an active peering connection with the VPC (`pcx-`)",
        "tgw-0123456789abcdef0",
    )
    networks: Cidrs = key("networks behind it; they can reach the API of the cluster", ["10.8.0.0/16"])


class AwsPoolSection(Section):
    """The instances of one pool of `node_pools`."""

    instance_types: list[str] = key(
        "the instance types; without any, the smallest with the pool's GPUs, CPUs and memory",
        ["g5.24xlarge"],
        default=[],
    )
    capacity: Literal["on-demand", "spot", "reserved"] = key(
        "how instances are bought; AWS can take spot instances away, and the batches of their jobs continue elsewhere",
        "spot",
        default="on-demand",
    )
    reservations: list[Annotated[str, resource_id("cr")]] = key(
        "ids of the capacity reservations, with `capacity: reserved`", ["cr-0123456789abcdef0"], default=[]
    )


class AwsSection(Section):
    """A private VPC with an EKS cluster. No internet gateway, no NAT, no public address."""

    region: Region = key("the region", "eu-central-1")
    account_id: AccountId = key("the account; another one is refused before any resource", "123456789012")
    zones: Annotated[list[str], Field(min_length=_ZONES, max_length=_ZONES)] = key(
        "three availability zones of the region", ["eu-central-1a", "eu-central-1b", "eu-central-1c"]
    )
    vpc: VpcSection = key("see below", {})
    administrators: Annotated[list[RoleArn], Field(min_length=1)] = key(
        "IAM roles that administer the cluster, among them the one that runs `pulumi up`; nobody else has access",
        ["arn:aws:iam::123456789012:role/cloister-operator"],
    )
    kubernetes_version: Annotated[str, AfterValidator(matching(r"1\.\d\d", "must be a minor version, e.g. 1.34"))] = (
        key("minor version of Kubernetes", "1.34", default="1.34")
    )
    pools: dict[str, AwsPoolSection] = key("instances of pools of `node_pools`, by name; see below", {}, default={})
    attachments: list[AttachmentSection] = key(
        "see below; without any, only the VPC itself has a route", [], default=[]
    )

    def subnets(self, kind: _SubnetKind) -> list[PlannedSubnet]:
        """Return the subnets of a kind, one in each zone.

        Nodes have three quarters of a new VPC. The other kinds have small subnets of their own, so that network
        policies can name the addresses of the API server, of endpoints and of the database.
        """
        if self.vpc.existing:
            return [
                PlannedSubnet(kind=kind, zone=each.zone, cidr=each.cidr, id=each.id)
                for each in self.vpc.existing.subnets
            ]
        *zones, rest = ipaddress.ip_network(str(self.vpc.cidr)).subnets(prefixlen_diff=2)
        cidrs = [str(network) for network in zones]
        if kind != "nodes":
            small = list(rest.subnets(new_prefix=27))
            first = _SMALL_KINDS.index(kind) * _ZONES
            cidrs = [str(network) for network in small[first : first + _ZONES]]
        return [PlannedSubnet(kind=kind, zone=zone, cidr=cidr) for zone, cidr in zip(self.zones, cidrs, strict=True)]

    def networks(self, kind: _SubnetKind) -> list[str]:
        """Return the addresses of the subnets of a kind."""
        return [subnet.cidr for subnet in self.subnets(kind)]

    def with_addresses(self, network: "NetworkSection") -> "NetworkSection":
        """Return the section ``network`` with the addresses of the cluster of this section.

        EKS Auto Mode runs CoreDNS on each node, and a pod may see the address of the Service or that of its node:
        https://docs.aws.amazon.com/eks/latest/userguide/auto-networking.html.
        """
        api = network.kubernetes_api.model_copy(update={"networks": self.networks("control-plane"), "port": 443})
        dns = [f"{CLUSTER_DNS}/32", *self.networks("nodes"), *network.dns_networks]
        return network.model_copy(update={"kubernetes_api": api, "dns_networks": list(dict.fromkeys(dns))})

    def instance_types(self, pool: "NodePool") -> tuple[InstanceType, ...]:
        """Return the instance types of a pool; none if no type has its GPUs and room for its pods."""
        section = self.pools.get(pool.name, AwsPoolSection())
        candidates = instance_types_of(pool.accelerator.name)
        if section.instance_types:
            candidates = [each for each in candidates if each.name in section.instance_types]
        size: dict[str, int] = {"cpus": pool.cpus, "memory_gib": pool.memory_gib}
        if pool.name == "system":
            # The pool states no size. Two nodes hold the service, and a third one its rollout.
            size = {"cpus": 3, "memory_gib": 12}
        if section.instance_types:
            return tuple(each for each in candidates if smallest_fitting([each], gpus=pool.gpus_per_node, **size))
        return smallest_fitting(candidates, gpus=pool.gpus_per_node, **size)


def aws_rules(sections: Mapping[str, Any], pools: "Mapping[str, NodePool]") -> Iterator[str]:
    """Check the section ``aws``, and what other sections say about its cluster, database and bucket.

    Args:
        sections: the valid sections by key.
        pools: the pools by name; empty if they are wrong.
    """
    aws: AwsSection | None = sections.get("aws")
    for name in ("database", "object_store"):
        section = sections.get(name)
        kind = section.kind if section else ""
        # A wrong section is missing, and reported already; in layer customer, which has `platform`, there is none.
        if kind == "aws" and aws is None and {"aws", "platform"} & sections.keys():
            yield (
                f"{name}.kind: aws needs the section aws, which makes its network, in layer all; add it, or use "
                f"{'external' if name == 'database' else 's3'}"
            )
        if aws and kind in ("bundled", "cloudnative_pg"):
            yield (
                f"{name}.kind: {kind} needs volumes, which a stack on AWS does not create; use aws, or "
                f"{'external' if name == 'database' else 's3'}"
            )
    if aws is None:
        return
    yield from _network_rules(aws)
    yield from _pool_rules(aws, pools)
    if sections.get("hosts"):
        yield "hosts: the cluster is one of EKS, which aws makes; remove one of the two sections"
    kubernetes: KubernetesSection | None = sections.get("kubernetes")
    if kubernetes and kubernetes.kubeconfig:
        yield "kubernetes.kubeconfig: the cluster is made by aws, which has the kubeconfig; remove this key"
    if kubernetes and not re.fullmatch(r"[a-z][a-z0-9-]{0,39}", kubernetes.context):
        yield (
            "kubernetes.context: names the cluster of EKS too; use at most 40 lower case letters, digits and hyphens, "
            "the first one a letter"
        )
    images: ImagesSection | None = sections.get("images")
    if images and not aws.attachments and not aws.vpc.existing:
        yield from _image_rules(aws, images)
    network: NetworkSection | None = sections.get("network")
    if network and network.plugin != "kubernetes":
        yield f"network.plugin: must be kubernetes with aws, whose own plugin enforces policies, not {network.plugin}"
    plugin: DevicePluginSection | None = sections.get("device_plugin")
    if plugin and plugin.install:
        yield "device_plugin.install: nodes of EKS Auto Mode have NVIDIA's device plugin; set false"
    weights, store = sections.get("model_weights"), sections.get("object_store")
    if weights and weights.kind == "object_store" and store and store.kind == "aws":
        yield (
            "model_weights.kind: object_store needs a key of the bucket in the pods of jobs, which have none on AWS; "
            "use image or volume"
        )


def _image_rules(aws: AwsSection, images: "ImagesSection") -> Iterator[str]:
    """Check that images are in the account's registry: without an attachment there is a route to no other one."""
    registry = f"{aws.account_id}.dkr.ecr.{aws.region}.amazonaws.com"
    given = {name: getattr(images, name) for name in ("service", "kuberay_operator")}
    given |= {f"ray_{variant}": getattr(images, f"ray_{variant}") for variant in images.ray}
    for name, image in given.items():
        if image is None:
            continue
        reference = str(images.mirrored(getattr(image, "image", image)))
        if not reference.startswith(f"{registry}/"):
            yield f"images.{name}: is not in the registry {registry}, the only one with a route; push it there"


def _network_rules(aws: AwsSection) -> Iterator[str]:
    """Check zones and networks of the VPC."""
    for index, zone in enumerate(aws.zones):
        if not zone.startswith(aws.region) or len(zone) != len(aws.region) + 1:
            yield f"aws.zones[{index}]: {zone} is not a zone of {aws.region}; use e.g. {aws.region}a"
    if repeated := [zone for zone, count in Counter(aws.zones).items() if count > 1]:
        yield f"aws.zones: must name three zones; {', '.join(repeated)} appears twice"
    existing = aws.vpc.existing
    if (aws.vpc.cidr is None) == (existing is None):
        yield "aws.vpc: must have one of cidr and existing"
        return
    own = {"aws.vpc.cidr": aws.vpc.cidr} if aws.vpc.cidr else {}
    if existing:
        own = {f"aws.vpc.existing.subnets[{index}]": each.cidr for index, each in enumerate(existing.subnets)}
        if sorted(each.zone for each in existing.subnets) != sorted(aws.zones):
            yield "aws.vpc.existing.subnets: must be one in each zone of aws.zones"
        if aws.attachments:
            yield "aws.attachments: belong to the owner of an existing VPC; remove them, and attach the VPC there"
    elif not 16 <= ipaddress.ip_network(str(aws.vpc.cidr)).prefixlen <= 20:  # noqa: PLR2004 - as the message states
        yield "aws.vpc.cidr: must be from /16 to /20, so that each zone has room for nodes and their pods"
    others = {"the network of Services": SERVICE_CIDR}
    for index, each in enumerate(aws.attachments):
        others |= {f"aws.attachments[{index}].networks": cidr for cidr in each.networks}
    if len(own) > 1:
        others |= own
    for place, cidr in own.items():
        for other_place, other in others.items():
            if place != other_place and ipaddress.ip_network(str(cidr)).overlaps(ipaddress.ip_network(str(other))):
                yield f"{place}: {cidr} overlaps with {other}, {other_place}; use another network"


def _pool_rules(aws: AwsSection, pools: "Mapping[str, NodePool]") -> Iterator[str]:
    """Check that each pool has instance types that fit, and how they are bought."""
    known = {each.name for each in INSTANCE_TYPES}
    for name, section in aws.pools.items():
        if pools and name not in pools:
            yield f"aws.pools.{name}: node_pools has no pool of this name; the pools are {', '.join(pools)}"
        for each in section.instance_types:
            if each not in known:
                yield f"aws.pools.{name}.instance_types: {each} is not in the table of infra/capacity/instance_types.py"
        if (section.capacity == "reserved") != bool(section.reservations):
            yield f"aws.pools.{name}.reservations: belongs to capacity reserved, which needs it"
    for pool in pools.values():
        at = f"node_pools.{pool.name}"
        if pool.hosts:
            continue
        if pool.nodes:
            yield f"{at}.nodes: AWS creates the nodes; set max_nodes instead"
        if pool.selector:
            yield f"{at}.selector: AWS creates the nodes with the label of the pool; remove it"
        offered = instance_types_of(pool.accelerator.name)
        if not offered:
            usable = ", ".join(dict.fromkeys(each.accelerator for each in INSTANCE_TYPES if each.gpus))
            yield f"{at}: AWS has no instance type with the accelerator {pool.accelerator.name}; it has {usable}"
        elif not aws.instance_types(pool):
            named = aws.pools[pool.name].instance_types if pool.name in aws.pools else []
            sizes = "; ".join(
                f"{each.name} has {each.gpus} GPUs, {each.pod_cpus} CPUs and {each.pod_memory_gib} GiB for pods"
                for each in offered
                if not named or each.name in named
            )
            yield f"{at}: no instance type has gpus_per_node, cpus and memory_gib of the pool: {sizes}"
