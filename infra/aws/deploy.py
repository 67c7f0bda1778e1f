"""Deploy what a stack needs of AWS: network and cluster first, then the data, then nodes and identities."""

from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws

from infra.aws.cluster import AwsCluster
from infra.aws.data import AwsBucket, AwsDatabase, Bucket, Database
from infra.aws.identity import AwsIdentities, IdentityArgs
from infra.aws.network import AwsNetwork
from infra.aws.node_pools import AwsNodePools, NodeArgs, offered_types
from infra.aws.policies import Place
from infra.aws.registry import AwsRegistry
from infra.stack_file.aws import AwsSection
from infra.stack_file.reading import StackConfig
from infra.stack_file.sections import AwsDatabaseSection, AwsObjectStoreSection


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsCloud:
    """The parts of a stack on AWS that exist before its Kubernetes objects.

    Attributes:
        section: the section of the stack file.
        place: account, region and name of the cluster.
        provider: the provider of AWS.
        network: the network.
        cluster: the cluster.
        registry: the registry.
        bucket: the bucket; None for another object store.
        database: the database; None for another one.
    """

    section: AwsSection
    place: Place
    provider: pulumi.ProviderResource
    network: AwsNetwork
    cluster: AwsCluster
    registry: AwsRegistry
    bucket: Bucket | None
    database: Database | None

    def exports(self) -> dict[str, Any]:
        """Return the outputs. None of them is secret: the kubeconfig holds no credential."""
        return {"kubeconfig": self.cluster.kubeconfig, "repositories": self.registry.urls}

    def nodes(self, config: StackConfig, opts: pulumi.ResourceOptions) -> tuple[pulumi.Resource, ...]:
        """Create the node pools in the cluster; they have no node until a pod needs one."""
        args = NodeArgs(
            names=config.names,
            role=self.cluster.node_role_name,
            subnet_ids=self.network.subnet_ids["nodes"],
            security_group_id=self.network.groups.nodes,
            key_arn=self.cluster.node_key_arn,
            zones=self.section.zones,
        )
        pools = {}
        for pool in config.pools.values():
            if not pool.hosts:
                types = self.section.instance_types(pool)
                pools[pool.name] = (pool, types, offered_types(pool, types, self.section, self.provider))
        return AwsNodePools("aws-node-pools", args, pools, self.section, opts=opts).resources

    def identities(self, config: StackConfig) -> tuple[pulumi.Resource, ...]:
        """Create the roles of the service's accounts."""
        args = IdentityArgs(
            names=config.names,
            place=self.place,
            cluster_name=self.cluster.name,
            bucket=self.bucket,
            prefix=config.names.object_prefix,
            database=self.database,
            service_role=config.names.database_service_role,
        )
        opts = pulumi.ResourceOptions(provider=self.provider)
        return AwsIdentities("aws-identities", args, opts=opts).resources


def deploy_cloud(config: StackConfig, section: AwsSection) -> AwsCloud:
    """Create network, cluster, registry, bucket and database.

    Args:
        config: the stack file.
        section: its section ``aws``.
    """
    file, names = config.file, config.names
    place = Place(account_id=section.account_id, region=section.region, cluster=file.kubernetes.context)
    tags = {"cloister:customer": names.customer, "cloister:environment": names.environment, "managed-by": "pulumi"}
    provider = pulumi_aws.Provider(
        "aws",
        region=section.region,
        # Credentials of another account fail before any resource.
        allowed_account_ids=[section.account_id],
        default_tags={"tags": tags},
    )
    opts = pulumi.ResourceOptions(provider=provider)
    keep = file.keep_data
    network = AwsNetwork("aws-network", section, place, opts=opts)
    cluster = AwsCluster("aws-cluster", section, place, network, keep_data=keep, opts=opts)
    registry = AwsRegistry("aws-registry", place, keep_data=keep, opts=opts)
    bucket, database = None, None
    if file.layer != "platform":
        if isinstance(file.object_store, AwsObjectStoreSection):
            bucket = AwsBucket("aws-bucket", names, place, keep_data=keep, opts=opts).bucket
        if isinstance(file.database, AwsDatabaseSection):
            found = AwsDatabase("aws-database", names, place, network, file.database, keep_data=keep, opts=opts)
            database = found.database
    return AwsCloud(
        section=section,
        place=place,
        provider=provider,
        network=network,
        cluster=cluster,
        registry=registry,
        bucket=bucket,
        database=database,
    )
