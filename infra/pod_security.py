"""What every container of a stack has in common: the restricted profile of Kubernetes, and its share of a node.

The profile is that of ``pod-security.kubernetes.io/enforce: restricted``
(https://kubernetes.io/docs/concepts/security/pod-security-standards/), and stricter in one thing: the root file
system is read-only.
"""

from collections.abc import Mapping
from typing import Any, Final

UID: Final = 10001
"""The user and group that the images run as, and that volumes belong to."""


def pod_security_context(*, uid: int = UID) -> dict[str, Any]:
    """The ``securityContext`` of a pod.

    Args:
        uid: the user and group of its processes; an image of others may need its own.
    """
    return {
        "runAsNonRoot": True,
        "runAsUser": uid,
        "runAsGroup": uid,
        "fsGroup": uid,
        # Without it a volume's every file gets its owner anew at each start: minutes on a volume of weights.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security_context() -> dict[str, Any]:
    """The ``securityContext`` of a container. What it writes goes to mounted volumes."""
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
    """The ``resources`` of a container: requests and limits, both always given.

    Args:
        cpu: requested CPUs, a Kubernetes quantity (``500m``).
        memory: requested memory, a Kubernetes quantity (``512Mi``).
        cpu_limit: the most CPUs; by default what is requested.
        memory_limit: the most memory; by default what is requested, so that a node is never short of it.
        ephemeral_storage: the most disk for logs and emptyDir volumes that are not in memory; also requested.
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


def temporary_volume(name: str, *, size: str) -> dict[str, Any]:
    """An ``emptyDir`` volume on the node's disk with a limit.

    Args:
        name: of the volume.
        size: the most that it holds, a Kubernetes quantity; a pod that writes more is evicted.
    """
    return {"name": name, "emptyDir": {"sizeLimit": size}}


def secret_volume(name: str, *, secret: str, items: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A volume of a Secret's values as files that the pod's user and group alone read.

    Args:
        name: of the volume.
        secret: the Secret's name.
        items: the files' names by the Secret's keys; all keys under their own names by default.
    """
    source: dict[str, Any] = {"secretName": secret, "defaultMode": 0o440}
    if items:
        source["items"] = [{"key": key, "path": path} for key, path in items.items()]
    return {"name": name, "secret": source}
