"""Kubernetes manifests of a recorded program, with Pulumi's options for them."""

import json
from dataclasses import dataclass, field
from typing import Any, Final

from infra.rendering.recording import Path, Recording

HELM_TYPES: Final = ("kubernetes:helm.sh/v3:Release", "kubernetes:helm.sh/v4:Chart", "kubernetes:helm.sh/v3:Chart")


def is_made_by_chart(urn: str) -> bool:
    """Return whether a Helm chart creates the resource with this URN."""
    return any(each in HELM_TYPES for each in urn.split("::")[2].split("$")[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One Kubernetes object.

    Attributes:
        body: the object, with secrets in plain text.
        secrets: paths of the secrets in ``body``.
        protected: Pulumi refuses to delete it.
        kept: it stays in the cluster when Pulumi removes it from its state.
        patch: it patches an object that the stack does not own.
        template_of: ConfigMap that contains the manifest of an object that the service creates; empty for all others.
    """

    body: dict[str, Any]
    secrets: frozenset[Path] = field(default_factory=frozenset)
    protected: bool = False
    kept: bool = False
    patch: bool = False
    template_of: str = ""

    @property
    def kind(self) -> str:
        """Kind of the object; ``Release`` or ``Chart`` for Helm."""
        return str(self.body.get("kind", ""))

    @property
    def name(self) -> str:
        """Name in the cluster; empty if the manifest sets none."""
        return str(self.metadata.get("name", ""))

    @property
    def namespace(self) -> str:
        """Namespace; empty for cluster-scoped objects."""
        return str(self.metadata.get("namespace", ""))

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the object."""
        found: dict[str, Any] = self.body.get("metadata") or {}
        return found

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the object."""
        found: dict[str, str] = self.metadata.get("labels") or {}
        return found

    @property
    def title(self) -> str:
        """Kind and name for messages: ``Deployment acme/api``."""
        place = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"{self.kind} {place}" + (f" in ConfigMap {self.template_of}" if self.template_of else "")


def manifests(recording: Recording) -> tuple[Manifest, ...]:
    """Return the manifests of a recording, ordered by namespace, kind and name.

    The manifest of a Helm chart has the chart's values in its ``spec``.
    """
    found = []
    for resource in recording.resources:
        if not resource.custom or not resource.type.startswith("kubernetes:"):
            continue
        body, secrets = resource.inputs, resource.secrets
        if resource.type in HELM_TYPES:
            spec = {key: value for key, value in body.items() if key != "namespace"}
            metadata = {"name": body.get("name", resource.name), "namespace": body.get("namespace", "")}
            kind = resource.type.rpartition(":")[2]
            body = {"apiVersion": "helm.sh", "kind": kind, "metadata": metadata, "spec": spec}
            secrets = frozenset(("spec", *path) for path in secrets)
        found.append(
            Manifest(
                body=body,
                secrets=secrets,
                protected=resource.protect,
                kept=resource.retain_on_delete,
                patch=resource.type.endswith("Patch"),
            )
        )
    return tuple(sorted(found, key=lambda manifest: (manifest.namespace, manifest.kind, manifest.name)))


def with_templates(given: tuple[Manifest, ...]) -> tuple[Manifest, ...]:
    """Return the manifests, and those in ConfigMaps: JSON of objects that the service creates later."""
    templates = []
    for config_map in given:
        if config_map.kind != "ConfigMap":
            continue
        for text in (config_map.body.get("data") or {}).values():
            try:
                body = json.loads(text)
            except ValueError:
                continue
            if isinstance(body, dict) and "apiVersion" in body and "kind" in body:
                templates.append(Manifest(body=body, template_of=config_map.name))
    return (*given, *templates)
