"""Invariants of pods, one manifest at a time."""

import re
from collections.abc import Iterator
from typing import Any, Final

from infra.manifests import Manifest
from infra.policy.pods import containers, pod_specs

_DIGEST: Final = re.compile(r"[^@\s]+/[^@\s]+@sha256:[0-9a-f]{64}")
_SECRET_NAME: Final = re.compile(r"(PASSWORD|PASSWD|SECRET|TOKEN|API_?KEY|CREDENTIALS?|ACCESS_KEY)$", re.IGNORECASE)
_HOST_FIELDS: Final = ("hostNetwork", "hostPID", "hostIPC")
_SERVERS: Final = ("Deployment", "StatefulSet", "DaemonSet")


def images_by_digest(manifest: Manifest) -> Iterator[str]:
    """Every image is named by its digest: a tag can be moved to other content."""
    for title, container in containers(manifest):
        image = str(container.get("image", ""))
        if not _DIGEST.fullmatch(image):
            yield f"{title} has the image {image!r}"
    if manifest.kind == "ImageCatalog":
        for image in manifest.body["spec"]["images"]:
            if not _DIGEST.fullmatch(image["image"]):
                yield f"the catalogue has the image {image['image']!r}"
    if manifest.body.get("apiVersion") == "helm.sh":
        yield from _chart_images(manifest.body["spec"].get("values"))


def _chart_images(values: Any) -> Iterator[str]:
    """Charts write ``repository``, ``tag`` and often ``digest``, and join them by ``:`` or ``@``."""
    if isinstance(values, list):
        for item in values:
            yield from _chart_images(item)
    if not isinstance(values, dict):
        return
    if isinstance(values.get("repository"), str) and ("tag" in values or "digest" in values):
        parts = (values["repository"], str(values.get("tag") or ""), str(values.get("digest") or ""))
        if not re.search(r"sha256:?[0-9a-f]{64}", ":".join(parts)):
            yield f"the chart's image {values['repository']!r} has no digest"
    for item in values.values():
        yield from _chart_images(item)


def restricted_security_context(manifest: Manifest) -> Iterator[str]:
    """Every pod keeps to the restricted profile of Kubernetes' pod security standards."""
    for _, spec in pod_specs(manifest):
        pod = spec.get("securityContext") or {}
        for kind in ("containers", "initContainers"):
            for container in spec.get(kind) or ():
                own = container.get("securityContext") or {}
                for problem in _unrestricted(pod, own):
                    yield f"container {container.get('name')}: {problem}"


def _unrestricted(pod: dict[str, Any], own: dict[str, Any]) -> Iterator[str]:
    both = pod | own
    if both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0:
        yield "may run as root"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "may get more privileges"
    if own.get("privileged"):
        yield "is privileged"
    capabilities = own.get("capabilities") or {}
    if capabilities.get("drop") != ["ALL"] or set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}:
        yield "has capabilities"
    if (both.get("seccompProfile") or {}).get("type") not in {"RuntimeDefault", "Localhost"}:
        yield "has no seccomp profile"


def read_only_root_file_system(manifest: Manifest) -> Iterator[str]:
    """No container can change its own programs; what it writes goes to volumes."""
    for title, container in containers(manifest):
        if (container.get("securityContext") or {}).get("readOnlyRootFilesystem") is not True:
            yield f"{title} can write to its image's files"


def requests_and_limits(manifest: Manifest) -> Iterator[str]:
    """Every container says how much CPU and memory it needs, and at most takes."""
    for title, container in containers(manifest):
        given = container.get("resources") or {}
        for side in ("requests", "limits"):
            missing = [name for name in ("cpu", "memory") if not (given.get(side) or {}).get(name)]
            if missing:
                yield f"{title} has no {side} of {' and '.join(missing)}"


def nothing_of_the_host(manifest: Manifest) -> Iterator[str]:
    """No pod sees its node's files, network or processes."""
    for _, spec in pod_specs(manifest):
        yield from (f"the pod has {name}" for name in _HOST_FIELDS if spec.get(name))
        for volume in spec.get("volumes") or ():
            if "hostPath" in volume:
                yield f"the volume {volume.get('name')} is {volume['hostPath'].get('path')} of the node"
    for title, container in containers(manifest):
        for port in container.get("ports") or ():
            if port.get("hostPort"):
                yield f"{title} takes the port {port['hostPort']} of the node"


def no_secret_in_an_environment(manifest: Manifest) -> Iterator[str]:
    """Secrets reach containers as files: an environment is shown by descriptions, crash reports and child processes."""
    for title, container in containers(manifest):
        for source in container.get("envFrom") or ():
            if "secretRef" in source:
                yield f"{title} takes all of the Secret {source['secretRef'].get('name')} into its environment"
        for variable in container.get("env") or ():
            name, value = str(variable.get("name", "")), variable.get("value") or ""
            if "secretKeyRef" in (variable.get("valueFrom") or {}):
                yield f"{title} has the variable {name} from a Secret"
            elif _SECRET_NAME.search(name) and value and not str(value).startswith("/"):
                yield f"{title} has the variable {name} in clear"


def probes_on_servers(manifest: Manifest) -> Iterator[str]:
    """Every container that listens on a port says when it is ready, and when it must be started again."""
    if manifest.kind not in _SERVERS:
        return
    for _, spec in pod_specs(manifest):
        for container in spec["containers"]:
            missing = [name for name in ("readinessProbe", "livenessProbe") if not container.get(name)]
            if container.get("ports") and missing:
                yield f"container {container.get('name')} has no {' and no '.join(missing)}"
