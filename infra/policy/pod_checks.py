"""Checks of pods, in any kind of manifest: Deployments and Jobs as well as RayJobs."""

import re
from collections.abc import Iterator
from typing import Any, Final

from infra.rendering.manifests import Manifest
from infra.rendering.recording import Path

Problems = Iterator[tuple[str, str]]
"""Names of the policies that a manifest breaks, each with the problem."""
_DIGEST: Final = re.compile(r"[^@\s]+/[^@\s]+@sha256:[0-9a-f]{64}")
_SECRET_NAME: Final = re.compile(r"(PASSWORD|PASSWD|SECRET|TOKEN|API_?KEY|CREDENTIALS?|ACCESS_KEY)$", re.IGNORECASE)
_HOST_FIELDS: Final = ("hostNetwork", "hostPID", "hostIPC")
_SERVERS: Final = ("Deployment", "StatefulSet", "DaemonSet")
_RAY_KINDS: Final = ("RayJob", "RayCluster", "RayService")
_JOB_TOKEN: Final = "set-by-the-launcher"  # noqa: S105 - the Secret of a job's token in a template
_HTTP_ENGINE: Final = "http-engine"
_WEIGHTS: Final = "weights-credentials"
_MAX_TOKEN_S: Final = 3_600
_NO_TELEMETRY: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_VISIBLE_GPUS: Final = "NVIDIA_VISIBLE_DEVICES"


def _objects(value: Any, path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield every object in a value with its path, the outer ones first."""
    if isinstance(value, dict):
        yield path, value
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in children:
        yield from _objects(item, (*path, key))


def pods(manifest: Manifest) -> Iterator[tuple[dict[str, str] | None, dict[str, Any]]]:
    """Yield the labels and the spec of every pod in a manifest; None for the labels of a pod without a template."""
    for path, found in _objects(manifest.body):
        if isinstance(found.get("containers"), list):
            template: Any = manifest.body
            for step in path[:-1]:
                template = template[step]
            yield (template.get("metadata") or {}).get("labels") or {} if len(path) > 1 else None, found


def _containers(manifest: Manifest) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every container of every pod, with a title such as ``container api``."""
    for _, spec in pods(manifest):
        for kind in ("containers", "initContainers", "ephemeralContainers"):
            for container in spec.get(kind) or ():
                title = "container" if kind == "containers" else "init container"
                yield f"{title} {container.get('name', '')}", container


def image_problems(manifest: Manifest) -> Problems:
    """Find images without a digest, also those that an operator or a chart runs, and images that are never pulled."""
    policy = "images_by_digest"
    for title, container in _containers(manifest):
        image = str(container.get("image", ""))
        if not _DIGEST.fullmatch(image):
            yield policy, f"{title} has the image {image!r}"
        if container.get("imagePullPolicy") == "Never":
            yield "images_are_pulled", f"{title} has imagePullPolicy Never"
    if manifest.kind == "ImageCatalog":
        for image in manifest.body["spec"]["images"]:
            if not _DIGEST.fullmatch(image["image"]):
                yield policy, f"the catalogue has the image {image['image']!r}"
    if manifest.body.get("apiVersion") != "helm.sh":
        return
    # A chart has `repository` with `tag`, `digest` or both, and joins them with `:` or `@`.
    for _, values in _objects(manifest.body["spec"].get("values")):
        if isinstance(values.get("repository"), str) and ("tag" in values or "digest" in values):
            reference = (values["repository"], str(values.get("tag") or ""), str(values.get("digest") or ""))
            if not re.search(r"sha256:?[0-9a-f]{64}", ":".join(reference)):
                yield policy, f"the chart's image {values['repository']!r} has no digest"


def pod_problems(manifest: Manifest) -> Problems:
    """Check each pod for access to its node and against the restricted profile, and servers for their probes."""
    for _, spec in pods(manifest):
        yield from (("nothing_of_the_host", f"the pod has {name}") for name in _HOST_FIELDS if spec.get(name))
        for volume in spec.get("volumes") or ():
            if "hostPath" in volume:
                path = volume["hostPath"].get("path")
                yield "nothing_of_the_host", f"the volume {volume.get('name')} is {path} of the node"
        for container in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ())):
            own = container.get("securityContext") or {}
            both = (spec.get("securityContext") or {}) | own
            capabilities = own.get("capabilities") or {}
            added = set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}
            problems = {
                ("no_root", "may run as root"): both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0,
                ("no_new_privileges", "may get more privileges"): own.get("allowPrivilegeEscalation") is not False,
                ("unprivileged", "is privileged"): own.get("privileged"),
                ("no_capabilities", "has capabilities"): capabilities.get("drop") != ["ALL"] or added,
                ("seccomp", "has no seccomp profile"): (both.get("seccompProfile") or {}).get("type")
                not in {"RuntimeDefault", "Localhost"},
            }
            for (policy, problem), found in problems.items():
                if found:
                    yield policy, f"container {container.get('name')}: {problem}"
        for container in spec["containers"]:
            missing = [name for name in ("readinessProbe", "livenessProbe") if not container.get(name)]
            if manifest.kind in _SERVERS and container.get("ports") and missing:
                yield "probes_on_servers", f"container {container.get('name')} has no {' and no '.join(missing)}"


def container_problems(manifest: Manifest) -> Problems:
    """Check the file system, resources, ports and environment of each container."""
    for title, container in _containers(manifest):
        if (container.get("securityContext") or {}).get("readOnlyRootFilesystem") is not True:
            yield "read_only_root_file_system", f"{title} can write to its image's files"
        given = container.get("resources") or {}
        for side in ("requests", "limits"):
            missing = [name for name in ("cpu", "memory") if not (given.get(side) or {}).get(name)]
            if missing:
                yield "requests_and_limits", f"{title} has no {side} of {' and '.join(missing)}"
        for port in container.get("ports") or ():
            if port.get("hostPort"):
                yield "nothing_of_the_host", f"{title} uses the port {port['hostPort']} of the node"
        for source in container.get("envFrom") or ():
            if "secretRef" in source:
                secret = source["secretRef"].get("name")
                yield "no_secret_in_an_environment", f"{title} has the whole Secret {secret} in its environment"
        for variable in container.get("env") or ():
            name, value = str(variable.get("name", "")), variable.get("value") or ""
            if "secretKeyRef" in (variable.get("valueFrom") or {}):
                yield "no_secret_in_an_environment", f"{title} has the variable {name} from a Secret"
            elif _SECRET_NAME.search(name) and value and not str(value).startswith("/"):
                yield "no_secret_in_an_environment", f"{title} has the variable {name} in plain text"


def images(manifest: Manifest) -> Iterator[str]:
    """Yield the references of all images of a manifest, also those that an operator or a chart runs."""
    yield from (str(container.get("image", "")) for _, container in _containers(manifest))
    if manifest.kind == "ImageCatalog":
        yield from (str(image["image"]) for image in manifest.body["spec"]["images"])
    if manifest.body.get("apiVersion") == "helm.sh":
        for _, values in _objects(manifest.body["spec"].get("values")):
            if isinstance(values.get("repository"), str) and ("tag" in values or "digest" in values):
                yield values["repository"].removesuffix("@sha256")


def environments(manifest: Manifest) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the plain variables of every container by name, with the title of the container."""
    for title, container in _containers(manifest):
        yield title, {str(each.get("name")): str(each.get("value") or "") for each in container.get("env") or ()}


def token_problems(manifest: Manifest) -> Problems:
    """Find tokens of the Kubernetes API that live longer than an hour."""
    policy = "short_lived_tokens"
    for path, found in _objects(manifest.body):
        if path and path[-1] == "serviceAccountToken" and found.get("expirationSeconds", 3_600) > _MAX_TOKEN_S:
            yield policy, f"{'.'.join(map(str, path))} lives {found['expirationSeconds']} s"
    if manifest.body.get("type") == "kubernetes.io/service-account-token":
        yield policy, "the Secret is a token that never expires"


def job_problems(manifest: Manifest) -> Problems:
    """Check the access to a Ray cluster, its telemetry and its entrypoint."""
    if manifest.kind not in _RAY_KINDS:
        return
    spec: dict[str, Any] = manifest.body.get("spec") or {}
    cluster: dict[str, Any] = spec if manifest.kind == "RayCluster" else spec.get("rayClusterSpec") or {}
    head: dict[str, Any] = cluster.get("headGroupSpec") or {}
    if (cluster.get("authOptions") or {}).get("mode") != "token":
        yield "ray_token", "authOptions.mode is not token"
    if head.get("serviceType", "ClusterIP") != "ClusterIP" or head.get("enableIngress"):
        yield "ray_stays_inside", "the head is open outside the cluster"
    if manifest.kind == "RayJob" and spec.get("entrypoint") != "python -m ray_job":
        yield "core_dumps_off", f"the entrypoint is {spec.get('entrypoint')!r}"
    for path, found in _objects(cluster):
        ray = [each for each in found.get("containers") or () if "containers" in found and isinstance(each, dict)]
        for container in ray:
            variables = {each.get("name"): each.get("value") for each in container.get("env") or ()}
            for policy, expected in (("telemetry_off", _NO_TELEMETRY), ("no_downloads", _OFFLINE)):
                for name, value in expected.items():
                    if variables.get(name) != value:
                        yield (
                            policy,
                            f"{'.'.join(map(str, path))}: container {container.get('name')} lacks {name}={value}",
                        )


def ray_problems(manifest: Manifest) -> Problems:
    """Check which credentials the containers of pods that run Ray mount: an engine parses untrusted input."""
    if manifest.kind not in _RAY_KINDS:
        return
    for path, spec in _objects(manifest.body):
        if not isinstance(spec.get("containers"), list):
            continue
        ray = _JOB_TOKEN if "headGroupSpec" in path else _HTTP_ENGINE
        held = {str(volume.get("name")): _credentials(volume) for volume in spec.get("volumes") or ()}
        for kind, allowed in (("containers", ray), ("initContainers", _WEIGHTS)):
            for container in spec.get(kind) or ():
                for mount in container.get("volumeMounts") or ():
                    for credential in held.get(str(mount.get("name")), ()):
                        if credential != allowed:
                            yield "no_credentials_in_ray_pods", f"container {container.get('name')} mounts {credential}"


def gpu_problems(manifest: Manifest) -> Problems:
    """Check that containers without a GPU are hidden from NVIDIA's container runtime, and the others are not."""
    if manifest.kind not in _RAY_KINDS:
        return
    for title, container in _containers(manifest):
        # Extended resources have names with a domain.
        has_gpu = any("/" in name for name in (container.get("resources") or {}).get("limits") or ())
        visible = {each["name"]: each.get("value") for each in container.get("env") or ()}.get(_VISIBLE_GPUS)
        if has_gpu and visible is not None:
            yield "gpus_on_request_only", f"{title} overrides the GPUs that the device plugin assigns to it"
        elif not has_gpu and visible != "void":
            yield "gpus_on_request_only", f"{title} requests no GPU and has {_VISIBLE_GPUS}={visible or ''}, not void"


def _credentials(volume: dict[str, Any]) -> tuple[str, ...]:
    """Return the credentials in a volume: names of Secrets, and tokens of the Kubernetes API."""
    sources = [volume, *((volume.get("projected") or {}).get("sources") or ())]
    secrets = [source["secret"] for source in sources if source.get("secret")]
    return (
        *(str(secret.get("secretName") or secret.get("name")) for secret in secrets),
        *("a token of the Kubernetes API" for source in sources if "serviceAccountToken" in source),
    )
