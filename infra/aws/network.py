"""Network of a stack: private subnets in three zones, endpoints of AWS services, security groups, flow logs.

There is no internet gateway, no NAT and no public address. What nodes and pods need of AWS they reach by endpoints:
https://docs.aws.amazon.com/eks/latest/userguide/private-clusters.html. A network policy cannot name a prefix list, so
pods reach S3 by an interface endpoint, whose addresses are those of its subnets. Every security group names other
groups, never addresses, except for the networks behind the attachments of the stack file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pulumi
from pulumi_aws import cloudwatch, ec2, ec2transitgateway, iam, vpc

from infra.aws.keys import create_key
from infra.aws.policies import Place, Statement, document, endpoint_policy, log_key_use, trust
from infra.stack_file.aws import AttachmentSection, AwsSection

HTTPS: Final = 443
POSTGRES: Final = 5432
KUBELET: Final = 10_250
_LOG_DAYS: Final = 90
INTERFACE_SERVICES: Final = (
    "ec2",
    "ecr.api",
    "ecr.dkr",
    "eks",
    "eks-auth",
    "elasticloadbalancing",
    "kms",
    "logs",
    "s3",
    "secretsmanager",
    "sts",
)
"""Services with an interface endpoint. Auto Mode's controllers run at AWS and need none."""
_SUBNET_KINDS: Final = ("nodes", "control-plane", "endpoints", "database")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityGroups:
    """Ids of the security groups."""

    control_plane: pulumi.Output[str]
    nodes: pulumi.Output[str]
    endpoints: pulumi.Output[str]
    database: pulumi.Output[str]


class AwsNetwork(pulumi.ComponentResource):
    """The VPC, or what the stack adds to an existing one.

    Attributes:
        subnet_ids: ids of the subnets by kind, one in each zone.
        groups: the security groups.
        ready: resources to create before nodes start.

    Args:
        name: logical name of the component.
        aws: the section of the stack file.
        place: account, region and name of the cluster, which is also the prefix of names.
        opts: options of the component.
    """

    subnet_ids: Mapping[str, list[pulumi.Input[str]]]
    groups: SecurityGroups
    ready: tuple[pulumi.Resource, ...]

    def __init__(self, name: str, aws: AwsSection, place: Place, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:aws:Network", name, None, opts)
        self._aws, self._place = aws, place
        self._child = pulumi.ResourceOptions(parent=self)
        self._tables: list[ec2.RouteTable] = []
        existing = aws.vpc.existing
        if existing:
            self._vpc_id: pulumi.Input[str] = existing.id
            self.subnet_ids = {kind: [subnet.id for subnet in aws.subnets("nodes")] for kind in _SUBNET_KINDS}
        else:
            self._vpc_id = self._vpc()
            self.subnet_ids = {kind: self._subnets(kind) for kind in _SUBNET_KINDS}
        attached = [self._attach(index, each) for index, each in enumerate(aws.attachments)]
        self.groups = self._security_groups()
        endpoints = self._endpoints() if existing is None or existing.create_endpoints else []
        self.ready = (*endpoints, *(route for routes in attached for route in routes))
        self.register_outputs({})

    def _vpc(self) -> pulumi.Output[str]:
        """Create the VPC, close its default security group, and log its connections."""
        name = self._place.cluster
        own = ec2.Vpc(
            "vpc",
            cidr_block=self._aws.vpc.cidr,
            # Endpoints have the public names of their services inside the VPC.
            enable_dns_support=True,
            enable_dns_hostnames=True,
            tags={"Name": name},
            opts=self._child,
        )
        # Without rules in the program the provider removes those that AWS created.
        ec2.DefaultSecurityGroup("default", vpc_id=own.id, ingress=[], egress=[], opts=self._child)
        key = create_key(
            f"{name}-logs", "logs of network and cluster", self._place, (log_key_use(self._place),), self._child
        )
        group = cloudwatch.LogGroup(
            "flow-logs",
            name=f"/cloister/{name}/flow-logs",
            retention_in_days=_LOG_DAYS,
            kms_key_id=key.arn,
            opts=self._child,
        )
        source = {"StringEquals": {"aws:SourceAccount": self._place.account_id}}
        role = iam.Role(
            "flow-logs",
            name=f"{name}-flow-logs",
            assume_role_policy=document(trust("vpc-flow-logs.amazonaws.com", condition=source)),
            opts=self._child,
        )
        # https://docs.aws.amazon.com/vpc/latest/userguide/flow-logs-iam-role.html
        writes = {
            "Effect": "Allow",
            "Action": ["logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"],
            "Resource": [group.arn.apply(lambda arn: f"{arn}:*")],
        }
        iam.RolePolicy("flow-logs", role=role.name, policy=document(writes), opts=self._child)
        ec2.FlowLog(
            "flow-log",
            vpc_id=own.id,
            traffic_type="ALL",
            log_destination_type="cloud-watch-logs",
            log_destination=group.arn,
            iam_role_arn=role.arn,
            opts=self._child,
        )
        result: pulumi.Output[str] = own.id
        return result

    def _subnets(self, kind: Any) -> list[pulumi.Input[str]]:
        """Create the subnets of a kind, each with its route table."""
        ids: list[pulumi.Input[str]] = []
        for subnet in self._aws.subnets(kind):
            name = f"{kind}-{subnet.zone}"
            created = ec2.Subnet(
                name,
                vpc_id=self._vpc_id,
                availability_zone=subnet.zone,
                cidr_block=subnet.cidr,
                map_public_ip_on_launch=False,
                tags={"Name": f"{self._place.cluster}-{name}"},
                opts=self._child,
            )
            table = ec2.RouteTable(
                name, vpc_id=self._vpc_id, tags={"Name": f"{self._place.cluster}-{name}"}, opts=self._child
            )
            ec2.RouteTableAssociation(name, subnet_id=created.id, route_table_id=table.id, opts=self._child)
            self._tables.append(table)
            ids.append(created.id)
        return ids

    def _attach(self, index: int, attachment: AttachmentSection) -> list[pulumi.Resource]:
        """Create the routes to the networks behind an attachment, from every subnet."""
        name, target, wait = f"attachment-{index}", {}, []
        match attachment.id.partition("-")[0]:
            case "tgw":
                wait = [
                    ec2transitgateway.VpcAttachment(
                        name,
                        transit_gateway_id=attachment.id,
                        vpc_id=self._vpc_id,
                        subnet_ids=self.subnet_ids["control-plane"],
                        opts=self._child,
                    )
                ]
                target = {"transit_gateway_id": attachment.id}
            case "vgw":
                wait = [
                    ec2.VpnGatewayAttachment(name, vpc_id=self._vpc_id, vpn_gateway_id=attachment.id, opts=self._child)
                ]
                target = {"gateway_id": attachment.id}
            case "pcx":
                target = {"vpc_peering_connection_id": attachment.id}
        return [
            ec2.Route(
                f"{name}-{number}-{position}",
                route_table_id=table.id,
                destination_cidr_block=network,
                **target,
                opts=pulumi.ResourceOptions(parent=self, depends_on=wait),
            )
            for number, network in enumerate(attachment.networks)
            for position, table in enumerate(self._tables)
        ]

    def _security_groups(self) -> SecurityGroups:
        """Create the groups, and the connections between them. Everything else is refused."""
        descriptions = {
            "control-plane": "API server of the cluster",
            "nodes": "Nodes and their pods",
            "endpoints": "Endpoints of AWS services",
            "database": "Postgres",
        }
        groups = {
            name: ec2.SecurityGroup(
                name,
                name=f"{self._place.cluster}-{name}",
                description=description,
                vpc_id=self._vpc_id,
                tags={"Name": f"{self._place.cluster}-{name}"},
                opts=self._child,
            )
            for name, description in descriptions.items()
        }
        connections = (
            ("nodes", "control-plane", "tcp", HTTPS),
            ("control-plane", "nodes", "tcp", KUBELET),
            ("nodes", "endpoints", "tcp", HTTPS),
            ("nodes", "database", "tcp", POSTGRES),
            # Pods share the group of their node; network policies decide between them.
            ("nodes", "nodes", "-1", None),
        )
        for source, target, protocol, port in connections:
            ports = {"ip_protocol": protocol, "from_port": port, "to_port": port}
            vpc.SecurityGroupEgressRule(
                f"{source}-to-{target}",
                security_group_id=groups[source].id,
                referenced_security_group_id=groups[target].id,
                description=descriptions[target],
                **ports,
                opts=self._child,
            )
            vpc.SecurityGroupIngressRule(
                f"{target}-from-{source}",
                security_group_id=groups[target].id,
                referenced_security_group_id=groups[source].id,
                description=descriptions[source],
                **ports,
                opts=self._child,
            )
        networks = dict.fromkeys(cidr for each in self._aws.attachments for cidr in each.networks)
        for cidr in networks:
            vpc.SecurityGroupIngressRule(
                f"control-plane-from-{cidr}",
                security_group_id=groups["control-plane"].id,
                cidr_ipv4=cidr,
                ip_protocol="tcp",
                from_port=HTTPS,
                to_port=HTTPS,
                description="Administrators behind an attachment",
                opts=self._child,
            )
        return SecurityGroups(
            control_plane=groups["control-plane"].id,
            nodes=groups["nodes"].id,
            endpoints=groups["endpoints"].id,
            database=groups["database"].id,
        )

    def _endpoints(self) -> list[pulumi.Resource]:
        """Create the endpoints. S3 has two: pods and nodes use the interface, by its private name."""
        created: list[pulumi.Resource] = [
            ec2.VpcEndpoint(
                service,
                vpc_id=self._vpc_id,
                vpc_endpoint_type="Interface",
                service_name=f"com.amazonaws.{self._place.region}.{service}",
                subnet_ids=self.subnet_ids["endpoints"],
                security_group_ids=[self.groups.endpoints],
                private_dns_enabled=True,
                policy=endpoint_policy(self._place, *endpoint_exceptions(service, self._place)),
                # Otherwise names of S3 lead to the gateway endpoint, whose addresses no network policy can name.
                dns_options={"private_dns_only_for_inbound_resolver_endpoint": False} if service == "s3" else None,
                opts=self._child,
            )
            for service in INTERFACE_SERVICES
        ]
        if self._tables:
            gateway = ec2.VpcEndpoint(
                "s3-gateway",
                vpc_id=self._vpc_id,
                vpc_endpoint_type="Gateway",
                service_name=f"com.amazonaws.{self._place.region}.s3",
                route_table_ids=[table.id for table in self._tables],
                policy=endpoint_policy(self._place, *endpoint_exceptions("s3", self._place)),
                opts=self._child,
            )
            created.append(gateway)
        return created


def endpoint_exceptions(service: str, place: Place) -> tuple[Statement, ...]:
    """Return the statements of an endpoint's policy about resources of other accounts: downloads of images.

    Layers are in a bucket of ECR, by URLs that ECR signs, so by a principal of AWS:
    https://docs.aws.amazon.com/AmazonECR/latest/userguide/vpc-endpoints.html. Images of EKS itself are in repositories
    of EKS: https://docs.aws.amazon.com/eks/latest/userguide/add-ons-images.html.
    """
    if service == "s3":
        bucket = f"arn:{place.partition}:s3:::prod-{place.region}-starport-layer-bucket/*"
        layers = {"Effect": "Allow", "Principal": "*", "Action": ["s3:GetObject"], "Resource": [bucket]}
        return ({"Sid": "LayersOfImages", **layers},)
    if service.startswith("ecr"):
        return (
            {
                "Sid": "ImagesOfEks",
                "Effect": "Allow",
                "Principal": "*",
                "Action": ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"],
                "Resource": f"arn:{place.partition}:ecr:{place.region}:*:repository/eks/*",
                "Condition": {"StringEquals": {"aws:PrincipalAccount": place.account_id}},
            },
        )
    return ()
