"""The manifests of every example stack, and Kubernetes' own schemas of them.

Strict: a field that Kubernetes does not know is an error, as it is with ``kubectl apply --validate=strict``.
"""

import copy
import functools
import json
from importlib import resources
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError
from referencing import Registry, Resource

from infra.rendering.manifests import Manifest, manifests
from infra.rendering.recording import Recording
from tests.infra.previewed_stacks import preview

SCHEMAS = resources.files("kubernetes_validate") / "kubernetes-json-schema/v1.35.0-local-strict"
# Kubernetes publishes no schemas of others' resources; these meet their definitions in a real cluster.
NOT_KUBERNETES_OWN = {
    "helm.sh": "a chart: Helm makes its manifests",
    "ray.io": "KubeRay",
    "monitoring.coreos.com": "Prometheus Operator",
    "postgresql.cnpg.io": "CloudNativePG",
    "karpenter.sh": "node pools of EKS",
    "eks.amazonaws.com": "node classes of EKS",
    "barmancloud.cnpg.io": "CloudNativePG's Barman Cloud plugin",
    "cilium.io": "Cilium",
    "gateway.networking.k8s.io": "Gateway API",
}


def group(manifest: Manifest) -> str:
    return str(manifest.body["apiVersion"]).partition("/")[0]


def read(name: str) -> Any:
    return json.loads((SCHEMAS / name).read_text())


@functools.cache
def registry() -> Registry[Any]:
    """The definitions that all schemas refer to: read once, because they are large."""
    return Resource.from_contents(read("_definitions.json")) @ Registry()


@functools.cache
def validator(api_version: str, kind: str) -> Draft202012Validator:
    """The schema of a kind; the files have names like ``networkpolicy-networking-v1.json``."""
    own_group, _, version = api_version.rpartition("/")
    name = "-".join(part for part in (kind.lower(), own_group.partition(".")[0], version) if part)
    schema = read(f"{name}.json")
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ registry())


def validate(body: dict[str, Any]) -> None:
    validator(body["apiVersion"], body["kind"]).validate(body)


def test_manifests_of_built_in_kinds_match_their_schemas(example: Recording) -> None:
    checked = [manifest for manifest in manifests(example) if group(manifest) not in NOT_KUBERNETES_OWN]

    for manifest in checked:
        validate(manifest.body)

    assert {"NetworkPolicy", "Namespace", "ValidatingAdmissionPolicy"} <= {manifest.kind for manifest in checked}


def test_unknown_field_is_found() -> None:
    [api] = [manifest for manifest in manifests(preview()) if (manifest.kind, manifest.name) == ("Deployment", "api")]
    body = copy.deepcopy(api.body)
    body["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}

    with pytest.raises(ValidationError, match="readynessProbe"):
        validate(body)


def test_kinds_without_a_schema_are_listed(example: Recording) -> None:
    groups = {group(manifest) for manifest in manifests(example)}

    custom = {name for name in groups if "." in name and not name.endswith(".k8s.io")}
    assert custom <= NOT_KUBERNETES_OWN.keys()
