"""Deploy the platform of a cluster: node labels, NVIDIA's device plugin, KubeRay. One stack of a cluster does it."""

import pulumi

from infra.capacity.pools import placement
from infra.shared_platform.device_plugin import DevicePlugin, DevicePluginArgs
from infra.shared_platform.kuberay import KubeRay, KubeRayArgs
from infra.shared_platform.node_pools import NodePools
from infra.stack_file.reading import StackConfig


def deploy_platform(config: StackConfig, opts: pulumi.ResourceOptions) -> tuple[pulumi.Resource, ...]:
    """Create the parts of the platform that the stack file assigns to this stack, which may be none.

    Returns:
        The resources to create before everything else of the stack.
    """
    file, names = config.file, config.names
    pools = config.pools
    resources: list[pulumi.Resource] = []
    if file.node_pools.manage_nodes:
        resources += NodePools("node-pools", names=names, pools=tuple(pools.values()), opts=opts).resources
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
            network_plugin=file.network.plugin,
            kubernetes_api=tuple(file.network.kubernetes_api.networks),
            kubernetes_api_port=file.network.kubernetes_api.port,
            dns_namespace=file.network.dns_namespace,
            dns_networks=tuple(file.network.dns_networks),
            docker_config=config.docker_config,
        )
        resources += KubeRay("kuberay", operator, opts=opts).resources
    return tuple(resources)
