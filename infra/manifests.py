"""The manifests of a recorded program: what the cluster would be given, and what Pulumi knows about it besides."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from infra.recording import Path, RecordedResource, Recording

HELM_TYPES: Final = ("kubernetes:helm.sh/v3:Release", "kubernetes:helm.sh/v4:Chart", "kubernetes:helm.sh/v3:Chart")
_PROVIDER: Final = "pulumi:providers:"
_PATCH: Final = "Patch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One Kubernetes object.

    Attributes:
        body: the object, with secrets in clear.
        secrets: where the secrets stand in ``body``.
        protected: Pulumi refuses to delete it.
        kept: it stays in the cluster when Pulumi forgets it.
        patch: it is a change of an object that others made.
        template_of: the ConfigMap that holds it, for an object that the service makes later; empty for all others.
    """

    body: dict[str, Any]
    secrets: frozenset[Path] = field(default_factory=frozenset)
    protected: bool = False
    kept: bool = False
    patch: bool = False
    template_of: str = ""

    @property
    def kind(self) -> str:
        """Kubernetes' word; ``Release`` or ``Chart`` for one of Helm's."""
        return str(self.body.get("kind", ""))

    @property
    def name(self) -> str:
        """The name in the cluster; empty where it has none of its own."""
        return str(self.metadata.get("name", ""))

    @property
    def namespace(self) -> str:
        """The namespace; empty for what belongs to none."""
        return str(self.metadata.get("namespace", ""))

    @property
    def metadata(self) -> dict[str, Any]:
        """The object's metadata."""
        found: dict[str, Any] = self.body.get("metadata") or {}
        return found

    @property
    def labels(self) -> dict[str, str]:
        """The object's labels."""
        found: dict[str, str] = self.metadata.get("labels") or {}
        return found

    @property
    def title(self) -> str:
        """What a person calls it: ``Deployment acme/api``."""
        place = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"{self.kind} {place}" + (f" in ConfigMap {self.template_of}" if self.template_of else "")


def manifests(recording: Recording) -> tuple[Manifest, ...]:
    """Everything that the cluster would be given, ordered by namespace, kind and name."""
    found = (
        manifest(resource)
        for resource in recording.resources
        if resource.custom and not resource.type.startswith(_PROVIDER)
    )
    return tuple(sorted(found, key=lambda each: (each.namespace, each.kind, each.name)))


def manifest(resource: RecordedResource) -> Manifest:
    """The manifest of one resource; that of a Helm chart has its values as ``spec``."""
    body, secrets = resource.inputs, resource.secrets
    if resource.type in HELM_TYPES:
        spec = {key: value for key, value in body.items() if key != "namespace"}
        metadata = {"name": body.get("name", resource.name), "namespace": body.get("namespace", "")}
        kind = resource.type.rpartition(":")[2]
        body = {"apiVersion": "helm.sh", "kind": kind, "metadata": metadata, "spec": spec}
        secrets = frozenset(("spec", *path) for path in secrets)
    return Manifest(
        body=body,
        secrets=secrets,
        protected=resource.protect,
        kept=resource.retain_on_delete,
        patch=resource.type.endswith(_PATCH),
    )


def with_templates(given: tuple[Manifest, ...]) -> tuple[Manifest, ...]:
    """The manifests, and those that stand in a ConfigMap as JSON for the service to submit later."""
    return (*given, *(template for each in given for template in _templates(each)))


def _templates(holder: Manifest) -> Iterator[Manifest]:
    if holder.kind != "ConfigMap":
        return
    for text in (holder.body.get("data") or {}).values():
        try:
            body = json.loads(text)
        except ValueError:
            continue
        if isinstance(body, dict) and "apiVersion" in body and "kind" in body:
            yield Manifest(body=body, template_of=holder.name)
