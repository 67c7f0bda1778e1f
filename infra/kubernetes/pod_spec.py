"""Fields that all pods of a stack share: security contexts, resources, volumes, and the digest of their configuration.

The security contexts follow the restricted profile of Kubernetes
(https://kubernetes.io/docs/concepts/security/pod-security-standards/). In addition, the root file system is read-only.
"""

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any, Final

import pulumi

UID: Final = 10001
"""User and group that the images run as, and that own the volumes."""
NO_GPU: Final = {"NVIDIA_VISIBLE_DEVICES": "void"}
"""Environment of a container without GPUs. Where NVIDIA's container runtime is the default one, it would give all GPUs
of the node to a container whose image says ``all``. It must not be set where the device plugin sets the same variable.
Source: https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/docker-specialized.html"""


def digest(*values: pulumi.Input[str]) -> pulumi.Output[str]:
    """Return 16 hexadecimal digits that depend on all values and their order. Use ``secret_digest`` for secrets.

    In an annotation of a pod, it makes a change of the pod's configuration roll the pod.
    """
    return pulumi.Output.all(*values).apply(lambda known: hashlib.sha256("\0".join(known).encode()).hexdigest()[:16])


def secret_digest(key: pulumi.Input[str], *values: pulumi.Input[str]) -> pulumi.Output[str]:
    """Return 16 hexadecimal digits that depend on secrets, as an HMAC-SHA256; a secret for Pulumi.

    Readers of a pod's annotations can confirm no guess of a weak password with them.

    Args:
        key: a secret that cannot be guessed.
        values: the secrets.
    """

    def digits(known: list[str]) -> str:
        message = "\0".join(["annotation of a pod", *known[1:]])
        return hmac.new(known[0].encode(), message.encode(), hashlib.sha256).hexdigest()[:16]

    return pulumi.Output.all(key, *values).apply(digits)


def pod_security_context(*, uid: int = UID) -> dict[str, Any]:
    """Return the ``securityContext`` of a pod.

    Args:
        uid: user and group of its processes; a third-party image may require another one.
    """
    return {
        "runAsNonRoot": True,
        "runAsUser": uid,
        "runAsGroup": uid,
        "fsGroup": uid,
        # By default, each start changes the owner of every file in a volume: minutes for a volume of weights.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security_context() -> dict[str, Any]:
    """Return the ``securityContext`` of a container, which can write to mounted volumes only."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def resources(
    *,
    cpu: str,
    memory: str,
    cpu_limit: str | None = None,
    memory_limit: str | None = None,
    ephemeral_storage: str = "1Gi",
    extended: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the ``resources`` of a container, with requests and limits.

    Args:
        cpu: requested CPUs, a Kubernetes quantity (``500m``).
        memory: requested memory, a Kubernetes quantity (``512Mi``).
        cpu_limit: limit of CPUs; by default the request.
        memory_limit: limit of memory; by default the request, so that a node never runs out of memory.
        ephemeral_storage: request and limit of disk for logs and emptyDir volumes that are not in memory.
        extended: whole devices, e.g. ``{"nvidia.com/gpu": 1}``.
    """
    devices = {name: str(count) for name, count in (extended or {}).items()}
    return {
        "requests": {"cpu": cpu, "memory": memory, "ephemeral-storage": ephemeral_storage, **devices},
        "limits": {
            "cpu": cpu_limit or cpu,
            "memory": memory_limit or memory,
            "ephemeral-storage": ephemeral_storage,
            **devices,
        },
    }


def secret_volume(name: str, *, secret: str, items: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a volume with a Secret's values as files that only the pod's user and group can read.

    Args:
        name: name of the volume.
        secret: name of the Secret.
        items: file names by the Secret's keys; by default each key is a file of that name.
    """
    source: dict[str, Any] = {"secretName": secret, "defaultMode": 0o440}
    if items:
        source["items"] = [{"key": key, "path": path} for key, path in items.items()]
    return {"name": name, "secret": source}
