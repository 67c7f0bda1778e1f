"""An EKS cluster with Auto Mode, whose API has a private address only.

Auto Mode: https://docs.aws.amazon.com/eks/latest/userguide/automode.html. Its built-in node pools are off: the program
makes those of the stack file (``node_pools``). Roles: auto-cluster-iam-role.html and auto-create-node-role.html there.
"""

from typing import Final

import pulumi
import yaml
from pulumi_aws import cloudwatch, eks, iam

from infra.aws.keys import create_key
from infra.aws.network import AwsNetwork
from infra.aws.policies import KEY_USE, Place, document, key_use_through, log_key_use, trust
from infra.stack_file.aws import SERVICE_CIDR, AwsSection

_LOG_DAYS: Final = 90
_LOG_TYPES: Final = ("api", "audit", "authenticator", "controllerManager", "scheduler")
_CLUSTER_POLICIES: Final = (
    "AmazonEKSBlockStoragePolicy",
    "AmazonEKSClusterPolicy",
    "AmazonEKSComputePolicy",
    "AmazonEKSLoadBalancingPolicy",
    "AmazonEKSNetworkingPolicy",
)
_NODE_POLICIES: Final = ("AmazonEC2ContainerRegistryPullOnly", "AmazonEKSWorkerNodeMinimalPolicy")
# Access policies have ARNs of EKS: https://docs.aws.amazon.com/eks/latest/userguide/access-policy-permissions.html.
_ADMINISTRATOR: Final = "cluster-access-policy/AmazonEKSClusterAdminPolicy"
_AUTO_NODE: Final = "cluster-access-policy/AmazonEKSAutoNodePolicy"


class AwsCluster(pulumi.ComponentResource):
    """The cluster, its roles, its keys, and the access of administrators.

    Attributes:
        name: name of the cluster, when it exists.
        kubeconfig: kubeconfig without a credential: `aws eks get-token` makes a token of the caller's identity. It
            exists when the caller has access.
        node_role_name: name of the role of nodes.
        node_key_arn: key of the nodes' disks.

    Args:
        name: logical name of the component.
        aws: the section of the stack file.
        place: account, region and name of the cluster.
        network: the network.
        keep_data: whether AWS refuses to delete the cluster.
        opts: options of the component.
    """

    name: pulumi.Output[str]
    kubeconfig: pulumi.Output[str]
    node_role_name: pulumi.Output[str]
    node_key_arn: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        aws: AwsSection,
        place: Place,
        network: AwsNetwork,
        *,
        keep_data: bool,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("cloister:aws:Cluster", name, None, opts)
        self._place = place
        self._child = pulumi.ResourceOptions(parent=self)
        role, attached = self._role("cluster", "eks.amazonaws.com", _CLUSTER_POLICIES)
        nodes, of_nodes = self._role("nodes", "ec2.amazonaws.com", _NODE_POLICIES)
        self.node_role_name = nodes.name
        secrets, disks, logs = self._keys(role)
        self.node_key_arn = disks
        group = cloudwatch.LogGroup(
            "control-plane",
            # EKS writes to the group of this name: https://docs.aws.amazon.com/eks/latest/userguide/control-plane-logs.html
            name=f"/aws/eks/{place.cluster}/cluster",
            retention_in_days=_LOG_DAYS,
            kms_key_id=logs,
            opts=self._child,
        )
        cluster = eks.Cluster(
            "cluster",
            name=place.cluster,
            version=aws.kubernetes_version,
            role_arn=role.arn,
            access_config={"authentication_mode": "API", "bootstrap_cluster_creator_admin_permissions": False},
            bootstrap_self_managed_addons=False,
            # These three are on or off together.
            compute_config={"enabled": True},
            kubernetes_network_config={
                "service_ipv4_cidr": SERVICE_CIDR,
                "elastic_load_balancing": {"enabled": True},
            },
            storage_config={"block_storage": {"enabled": True}},
            vpc_config={
                "endpoint_private_access": True,
                "endpoint_public_access": False,
                "subnet_ids": network.subnet_ids["control-plane"],
                "security_group_ids": [network.groups.control_plane],
            },
            encryption_config={"provider": {"key_arn": secrets}, "resources": ["secrets"]},
            enabled_cluster_log_types=list(_LOG_TYPES),
            deletion_protection=keep_data,
            opts=pulumi.ResourceOptions(
                parent=self, protect=keep_data, depends_on=[group, *attached, *of_nodes, *network.ready]
            ),
        )
        self.name = cluster.name
        access = [
            self._access("nodes", cluster, nodes.arn, type_="EC2", policy=_AUTO_NODE),
            *(
                self._access(f"administrator-{index}", cluster, arn, type_="STANDARD", policy=_ADMINISTRATOR)
                for index, arn in enumerate(aws.administrators)
            ),
        ]
        authority = cluster.certificate_authority.apply(lambda found: found["data"])
        self.kubeconfig = pulumi.Output.all(cluster.endpoint, authority, *(each.id for each in access)).apply(
            lambda values: kubeconfig(place, endpoint=values[0], authority=values[1])
        )
        self.register_outputs({})

    def _role(
        self, name: str, service: str, policies: tuple[str, ...]
    ) -> tuple[iam.Role, list[iam.RolePolicyAttachment]]:
        """Create a role with policies that AWS manages for Auto Mode."""
        role = iam.Role(
            name,
            name=f"{self._place.cluster}-{name}",
            assume_role_policy=document(trust(service, tags_session=name == "cluster")),
            opts=self._child,
        )
        return role, [
            iam.RolePolicyAttachment(
                f"{name}-{policy}", role=role.name, policy_arn=self._place.managed_policy(policy), opts=self._child
            )
            for policy in policies
        ]

    def _keys(self, role: iam.Role) -> tuple[pulumi.Output[str], pulumi.Output[str], pulumi.Output[str]]:
        """Create the keys of Secrets in etcd, of nodes' disks, and of logs; return their ARNs.

        The role of the cluster creates instances, so it uses the key of their disks:
        https://docs.aws.amazon.com/eks/latest/userguide/create-node-class.html.
        """
        place, name = self._place, self._place.cluster
        by_cluster = {
            "Sid": "Cluster",
            "Effect": "Allow",
            "Principal": {"AWS": role.arn},
            "Action": list(KEY_USE),
            "Resource": "*",
        }
        grants = {
            "Sid": "Grants",
            "Effect": "Allow",
            "Principal": {"AWS": [role.arn, place.root]},
            "Action": ["kms:CreateGrant"],
            "Resource": "*",
            "Condition": {
                "Bool": {"kms:GrantIsForAWSResource": "true"},
                "StringEquals": {"kms:CallerAccount": place.account_id},
            },
        }
        users = {
            "secrets": ("Kubernetes Secrets in etcd", (by_cluster, grants)),
            "disks": ("disks of nodes", (by_cluster, grants, key_use_through(place, ["ec2"]))),
            "control-plane-logs": ("logs of the control plane", (log_key_use(place),)),
        }
        arns = [
            create_key(f"{name}-{purpose}", description, place, statements, self._child).arn
            for purpose, (description, statements) in users.items()
        ]
        return arns[0], arns[1], arns[2]

    def _access(
        self, name: str, cluster: eks.Cluster, principal: pulumi.Input[str], *, type_: str, policy: str
    ) -> eks.AccessPolicyAssociation:
        entry = eks.AccessEntry(name, cluster_name=cluster.name, principal_arn=principal, type=type_, opts=self._child)
        return eks.AccessPolicyAssociation(
            name,
            cluster_name=cluster.name,
            principal_arn=principal,
            policy_arn=f"arn:{self._place.partition}:eks::aws:{policy}",
            access_scope={"type": "cluster"},
            opts=pulumi.ResourceOptions(parent=self, depends_on=[entry]),
        )


def kubeconfig(place: Place, *, endpoint: str, authority: str) -> str:
    """Return a kubeconfig that asks the AWS command line for tokens.

    Source: https://docs.aws.amazon.com/eks/latest/userguide/create-kubeconfig.html.
    """
    name = place.cluster
    command = {
        "apiVersion": "client.authentication.k8s.io/v1beta1",
        "command": "aws",
        "args": ["eks", "get-token", "--cluster-name", name, "--region", place.region, "--output", "json"],
        "interactiveMode": "Never",
    }
    cluster = {"server": endpoint, "certificate-authority-data": authority}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": cluster}],
            "users": [{"name": name, "user": {"exec": command}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "current-context": name,
        }
    )
