"""Deploy the platform of a cluster: node labels, NVIDIA's device plugin, KubeRay, and the register of its customers."""

from collections.abc import Callable

import pulumi

from infra.capacity.pools import placement
from infra.shared_platform.customers import CustomerRegister, JobsNamespaces
from infra.shared_platform.device_plugin import DevicePlugin, DevicePluginArgs
from infra.shared_platform.kuberay import KubeRay, KubeRayArgs
from infra.shared_platform.node_pools import NodePools
from infra.shared_platform.outputs import PlatformOutputs
from infra.stack_file.reading import StackConfig


def deploy_platform(
    config: StackConfig, jobs_namespaces: tuple[str, ...], opts: pulumi.ResourceOptions
) -> tuple[pulumi.Resource, ...]:
    """Create the parts of the platform that the stack file assigns to this stack, which may be none.

    Args:
        config: the stack file.
        jobs_namespaces: the namespaces that KubeRay watches.
        opts: options of the components; the namespaces exist before them.
    """
    file, names = config.file, config.names
    pools = config.pools
    owners = {node: each.customer for each in file.customers for node in each.nodes}
    resources: list[pulumi.Resource] = []
    if file.node_pools.manage_nodes:
        resources += NodePools(
            "node-pools", names=names, pools=tuple(pools.values()), owners=owners, opts=opts
        ).resources
    if file.device_plugin.install and file.images.device_plugin:
        plugin = DevicePluginArgs(
            names=names,
            image=file.images.mirrored(file.images.device_plugin),
            pools=[pool for pool in pools.values() if pool.gpus_per_node],
            docker_config=config.docker_config,
        )
        resources += DevicePlugin("device-plugin", plugin, opts=opts).resources
    if file.kuberay.install == "helm" and file.images.kuberay_operator:
        operator = KubeRayArgs(
            names=names,
            repository=file.kuberay.chart.repository,
            version=file.kuberay.chart.version,
            skip_crds=file.kuberay.chart.skip_crds,
            namespace=file.kuberay.namespace,
            image=file.images.mirrored(file.images.kuberay_operator),
            placement=placement(pools["system"]),
            jobs_namespaces=jobs_namespaces,
            network_plugin=file.network.plugin,
            kubernetes_api=tuple(file.network.kubernetes_api.networks),
            kubernetes_api_port=file.network.kubernetes_api.port,
            dns_namespace=file.network.dns_namespace,
            dns_networks=tuple(file.network.dns_networks),
            docker_config=config.docker_config,
        )
        resources += KubeRay("kuberay", operator, opts=opts).resources
    return tuple(resources)


def deploy_shared_platform(config: StackConfig, after: Callable[..., pulumi.ResourceOptions]) -> PlatformOutputs:
    """Create the platform of a stack of the layer ``platform``, for the customers in its stack file.

    Args:
        config: the stack file.
        after: returns the options of a component whose resources are created after those that it takes.
    """
    customers = tuple(each.names for each in config.file.customers)
    watched = tuple(names.jobs_namespace for names in customers)
    namespaces = JobsNamespaces("jobs-namespaces", customers, opts=after())
    parts = deploy_platform(config, watched, after(*namespaces.resources))
    CustomerRegister("customers", (*namespaces.resources, *parts), opts=after())
    return PlatformOutputs(kuberay_namespace=config.file.kuberay.namespace, jobs_namespaces=list(watched))
