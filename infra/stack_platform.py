"""What a cluster has once, and one of its stacks looks after: labels of nodes, NVIDIA's device plugin, KubeRay."""

import pulumi

from infra.config import StackConfig
from infra.config_mapping import mirrored, node_pools
from infra.device_plugin import DevicePlugin, DevicePluginArgs
from infra.images import docker_config
from infra.kuberay import KubeRay, KubeRayArgs
from infra.node_pools import NodePools, NodePoolsArgs
from infra.pools import GPU_POOLS, placement


def platform(config: StackConfig, opts: pulumi.ResourceOptions) -> tuple[pulumi.Resource, ...]:
    """Makes what the stack file says that this stack looks after, which may be nothing.

    Returns:
        What has to be there before anything of the stack is.
    """
    file, names = config.file, config.names
    pools = node_pools(file.node_pools)
    made: list[pulumi.Resource] = []
    if file.node_pools.manage_nodes:
        made += NodePools("node-pools", NodePoolsArgs(names=names, pools=tuple(pools.values())), opts=opts).made
    if file.device_plugin.install and file.images.device_plugin:
        plugin = DevicePluginArgs(
            names=names,
            image=mirrored(file.images, file.images.device_plugin),
            pools=[name for name in GPU_POOLS if name in pools],
            docker_config=registry_login(config),
        )
        made += DevicePlugin("device-plugin", plugin, opts=opts).made
    if file.kuberay.install == "helm" and file.images.kuberay_operator:
        operator = KubeRayArgs(
            names=names,
            repository=file.kuberay.chart.repository,
            version=file.kuberay.chart.version,
            namespace=file.kuberay.namespace,
            image=mirrored(file.images, file.images.kuberay_operator),
            placement=placement("system"),
            kubernetes_api=tuple(file.network.kubernetes_api.networks),
            kubernetes_api_port=file.network.kubernetes_api.port,
            dns_namespace=file.network.dns_namespace,
            dns_networks=tuple(file.network.dns_networks),
            docker_config=registry_login(config),
        )
        made += KubeRay("kuberay", operator, opts=opts).made
    return tuple(made)


def registry_login(config: StackConfig) -> pulumi.Output[str] | None:
    """The content of a pull secret; None where the registry asks for no login."""
    secret = config.file.images.pull_secret
    if secret is None:
        return None
    return config.secret("registry_password").apply(
        lambda password: docker_config(registry=secret.registry, username=secret.username, password=password)
    )
