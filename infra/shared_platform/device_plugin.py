"""NVIDIA's device plugin on the GPU nodes, which reports their GPUs to Kubernetes so that pods can request them.

The nodes already have the driver and the NVIDIA container runtime. The plugin is the only workload of a stack that
violates the restricted profile: it runs as root and opens a socket in a directory of the kubelet. So it runs in a
separate namespace.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pulumi
from pulumi_kubernetes import apps, meta

from infra.capacity.pools import NodePool, placement
from infra.kubernetes.images import PULL_SECRET, ImageReference
from infra.kubernetes.naming import StackNames
from infra.kubernetes.pod_spec import container_security_context, resources
from infra.shared_platform.namespace import platform_namespace
from ray_job.contract.cluster import CUSTOMER_LABEL

NAMESPACE: Final = "cloister-device-plugin"
COMPONENT: Final = "device-plugin"
# https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/
_SOCKETS: Final = "/var/lib/kubelet/device-plugins"


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePluginArgs:
    """Image and nodes of the plugin. Exactly one stack of a cluster installs it.

    Attributes:
        names: names of the stack.
        image: NVIDIA's k8s-device-plugin.
        pools: the GPU pools.
        docker_config: content of the pull secret; None if the registry requires no login.
    """

    names: StackNames
    image: ImageReference
    pools: Sequence[NodePool]
    docker_config: pulumi.Input[str] | None = None


class DevicePlugin(pulumi.ComponentResource):
    """The plugin's namespace, and a DaemonSet for each RuntimeClass."""

    resources: tuple[pulumi.Resource, ...]

    def __init__(self, name: str, args: DevicePluginArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:device_plugin:DevicePlugin", name, None, opts)
        has_slices = any(pool.accelerator.is_mig for pool in args.pools)
        container = {
            "name": COMPONENT,
            "image": str(args.image),
            "env": [
                # On a node without a working driver the plugin's pod fails, instead of jobs waiting for GPUs.
                {"name": "FAIL_ON_INIT_ERROR", "value": "true"},
                {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
                {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"},
                # Slices have separate resources: https://github.com/NVIDIA/k8s-device-plugin#mig
                *([{"name": "MIG_STRATEGY", "value": "mixed"}] if has_slices else []),
            ],
            "resources": resources(cpu="50m", memory="128Mi", cpu_limit="500m", ephemeral_storage="64Mi"),
            # The kubelet's directory belongs to root.
            "securityContext": {**container_security_context(), "runAsNonRoot": False, "runAsUser": 0},
            "volumeMounts": [{"name": "sockets", "mountPath": _SOCKETS}],
        }
        pod: Any = {
            "priorityClassName": "system-node-critical",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **({"imagePullSecrets": [{"name": PULL_SECRET}]} if args.docker_config is not None else {}),
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": [{"name": "sockets", "hostPath": {"path": _SOCKETS, "type": "Directory"}}],
        }
        namespace = platform_namespace(
            NAMESPACE,
            names=args.names,
            component=COMPONENT,
            profile="privileged",
            docker_config=args.docker_config,
            parent=self,
        )
        daemon_sets = []
        for runtime_class in dict.fromkeys(pool.runtime_class for pool in args.pools):
            pools = tuple(pool for pool in args.pools if pool.runtime_class == runtime_class)
            name = f"{COMPONENT}-{runtime_class}" if runtime_class else COMPONENT
            fields = {**pod, **placement(NodePool(name=name, hosts=pools))}
            # The plugin runs on the nodes of every customer.
            fields["tolerations"] = [*fields["tolerations"], {"key": CUSTOMER_LABEL, "operator": "Exists"}]
            if runtime_class:
                fields["runtimeClassName"] = runtime_class
            own = {"cloister.dev/runtime-class": runtime_class} if runtime_class else {}
            labels = {**args.names.labels(COMPONENT), **own}
            daemon_set = apps.v1.DaemonSet(
                name,
                metadata=meta.v1.ObjectMetaArgs(name=name, namespace=NAMESPACE, labels=labels),
                spec={
                    "selector": {"matchLabels": {**args.names.selector(COMPONENT), **own}},
                    "updateStrategy": {"type": "RollingUpdate"},
                    "template": {"metadata": {"labels": labels}, "spec": fields},
                },
                opts=pulumi.ResourceOptions(parent=self, depends_on=namespace),
            )
            daemon_sets.append(daemon_set)
        self.resources = (*namespace, *daemon_sets)
        self.register_outputs({})
