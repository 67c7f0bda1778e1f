"""The pods inside of any kind of manifest: those of Deployments and Jobs as well as those of RayJobs."""

from collections.abc import Iterator
from typing import Any

from infra.manifests import Manifest
from infra.recording import Path

CONTAINER_LISTS = ("containers", "initContainers", "ephemeralContainers")


def pod_specs(manifest: Manifest) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every pod's spec in a manifest, with its path."""
    yield from _pod_specs(manifest.body, ())


def _pod_specs(value: Any, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _pod_specs(item, (*path, index))
    if not isinstance(value, dict):
        return
    if isinstance(value.get("containers"), list):
        yield path, value
        return
    for key, item in value.items():
        yield from _pod_specs(item, (*path, key))


def pod_labels(manifest: Manifest) -> Iterator[tuple[Path, dict[str, str]]]:
    """The labels of every pod template in a manifest, with the path of its metadata."""
    for path, _ in pod_specs(manifest):
        template: Any = manifest.body
        for step in path[:-1]:
            template = template[step]
        if len(path) > 1:
            yield (*path[:-1], "metadata"), (template.get("metadata") or {}).get("labels") or {}


def containers(manifest: Manifest) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every container of every pod, with a title such as ``container api``."""
    for _, spec in pod_specs(manifest):
        for kind in CONTAINER_LISTS:
            for container in spec.get(kind) or ():
                word = "container" if kind == "containers" else "init container"
                yield f"{word} {container.get('name', '')}", container
