"""NVIDIA's device plugin on the GPU nodes: it tells Kubernetes of the GPUs, so that pods can ask for them.

The nodes bring driver and NVIDIA container runtime along. The plugin is the one thing of a stack that is not of the
restricted profile: it runs as root and opens a socket in a directory of the kubelet. So it has a namespace of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pulumi
from pulumi_kubernetes import apps, meta

from infra.images import PULL_SECRET, ImageReference
from infra.naming import StackNames
from infra.platform_namespace import PlatformNamespace
from infra.pod_security import container_security_context, resources
from infra.pools import GPU_RESOURCE, POOL_LABEL, PoolName

NAMESPACE: Final = "cloister-device-plugin"
COMPONENT: Final = "device-plugin"
# https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/
_SOCKETS: Final = "/var/lib/kubelet/device-plugins"


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePluginArgs:
    """Where the plugin runs. Exactly one stack of a cluster installs it.

    Attributes:
        names: the stack.
        image: NVIDIA's k8s-device-plugin.
        pools: the GPU pools.
        docker_config: of a registry that asks for a login; None for none.
    """

    names: StackNames
    image: ImageReference
    pools: Sequence[PoolName]
    docker_config: pulumi.Input[str] | None = None


def device_plugin_pod(args: DevicePluginArgs) -> dict[str, Any]:
    """The template of the DaemonSet's pods."""
    in_pools = {"key": POOL_LABEL, "operator": "In", "values": list(args.pools)}
    node_affinity = {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [in_pools]}]}
    }
    return {
        "metadata": {"labels": args.names.labels(COMPONENT)},
        "spec": {
            "affinity": {"nodeAffinity": node_affinity},
            "tolerations": [{"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}],
            "priorityClassName": "system-node-critical",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **({"imagePullSecrets": [{"name": PULL_SECRET}]} if args.docker_config is not None else {}),
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": COMPONENT,
                    "image": str(args.image),
                    "env": [
                        # A node without a working driver shows in its pod, not in jobs that wait.
                        {"name": "FAIL_ON_INIT_ERROR", "value": "true"},
                        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
                        {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"},
                    ],
                    "resources": resources(cpu="50m", memory="128Mi", cpu_limit="500m", ephemeral_storage="64Mi"),
                    # The kubelet's directory belongs to root.
                    "securityContext": {**container_security_context(), "runAsNonRoot": False, "runAsUser": 0},
                    "volumeMounts": [{"name": "sockets", "mountPath": _SOCKETS}],
                }
            ],
            "volumes": [{"name": "sockets", "hostPath": {"path": _SOCKETS, "type": "Directory"}}],
        },
    }


class DevicePlugin(pulumi.ComponentResource):
    """The plugin's namespace and its DaemonSet."""

    made: tuple[pulumi.Resource, ...]

    def __init__(self, name: str, args: DevicePluginArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:device_plugin:DevicePlugin", name, None, opts)
        made = PlatformNamespace(
            names=args.names,
            name=NAMESPACE,
            component=COMPONENT,
            profile="privileged",
            docker_config=args.docker_config,
        ).make(self)
        made.append(
            apps.v1.DaemonSet(
                COMPONENT,
                metadata=meta.v1.ObjectMetaArgs(
                    name=COMPONENT, namespace=NAMESPACE, labels=args.names.labels(COMPONENT)
                ),
                spec={
                    "selector": {"matchLabels": args.names.selector(COMPONENT)},
                    "updateStrategy": {"type": "RollingUpdate"},
                    "template": device_plugin_pod(args),
                },
                opts=pulumi.ResourceOptions(parent=self, depends_on=list(made)),
            )
        )
        self.made = tuple(made)
        self.register_outputs({})
