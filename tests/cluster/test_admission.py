"""Manifests of every example stack file, checked by a real API server."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from infra.rendering.manifests import Manifest, manifests, with_templates
from infra.rendering.render import record_stack
from tests.cluster.api import Answer, ApiError, KubernetesApi
from tests.infra.previewed_stacks import FILES, PLATFORM_STACK, STACKS, STACKS_OF_CUSTOMERS

pytestmark = pytest.mark.cluster

# Defined by Helm charts, CloudNativePG, Prometheus Operator and EKS Auto Mode.
_NOT_THERE = {
    *("Chart", "Cluster", "Database", "ImageCatalog", "ObjectStore", "ScheduledBackup"),
    *("PodMonitor", "PrometheusRule", "ServiceMonitor"),
    *("NodeClass", "NodePool"),
}

# Created by the cluster's own tools where there are GPUs.
_RUNTIME_CLASS = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": "nvidia"},
    "handler": "nvidia",
}


EACH_STACK = pytest.mark.parametrize("given", FILES, ids=STACKS, indirect=True)
EACH_STACK_WITH_PODS = pytest.mark.parametrize(
    "given",
    [file for file, name in zip(FILES, STACKS, strict=True) if name in STACKS_OF_CUSTOMERS],
    ids=STACKS_OF_CUSTOMERS,
    indirect=True,
)


@pytest.fixture(scope="module")
def given(request: pytest.FixtureRequest) -> tuple[Manifest, ...]:
    return with_templates(manifests(record_stack(request.param)))


@pytest.fixture(scope="module")
def platform() -> tuple[Manifest, ...]:
    return manifests(record_stack(FILES[STACKS.index(PLATFORM_STACK)]))


@pytest.fixture(scope="module")
def namespaces(given: tuple[Manifest, ...], platform: tuple[Manifest, ...], api: KubernetesApi) -> Iterator[None]:
    """Create what pods and dry runs need of a stack: namespaces, priority classes, service accounts.

    Namespaces of customers' jobs belong to the stack of their platform.
    """
    kinds = ("Namespace", "PriorityClass", "ServiceAccount")
    made = sorted((each.body for each in given if each.kind in kinds), key=lambda body: kinds.index(body["kind"]))
    own = {body["metadata"]["name"] for body in made if body["kind"] == "Namespace"}
    shared = [each.body for each in platform if each.kind == "Namespace" and each.name not in own]
    made = [*shared, *made, _RUNTIME_CLASS]
    for body in made:
        api.create(body)
    yield
    outside = [body for body in made if "namespace" not in body["metadata"]]
    for body in outside:
        api.delete(body["apiVersion"], body["kind"], body["metadata"]["name"])
    for body in outside:
        api.wait_until_gone(body["apiVersion"], body["kind"], body["metadata"]["name"], within_s=120)


def tried(api: KubernetesApi, each: Manifest) -> Answer:
    body = copy.deepcopy(each.body)
    if each.template_of:
        body["metadata"]["name"] = "batch-00000000000000000000000000000001-1"
    return api.apply(body, field_manager="test", dry_run=True)


@EACH_STACK
@pytest.mark.usefixtures("namespaces")
def test_server_accepts_every_manifest_without_a_warning(given: tuple[Manifest, ...], api: KubernetesApi) -> None:
    known = [each for each in given if "spec" not in each.body or api.knows(each.body["apiVersion"], each.kind)]
    problems = []
    for each in known:
        if each.patch:
            continue
        try:
            problems += [f"{each.title}: {warning}" for warning in tried(api, each).warnings]
        except ApiError as error:
            problems.append(f"{each.title}: {error}")
    assert problems == []
    unknown = {each.kind for each in given} - {each.kind for each in known}
    assert unknown <= _NOT_THERE


@EACH_STACK_WITH_PODS
@pytest.mark.usefixtures("namespaces")
def test_every_pod_is_admitted_without_a_warning(given: tuple[Manifest, ...], api: KubernetesApi) -> None:
    problems = []
    pods = list(pods_of(given))
    assert len(pods) >= 6  # API, reconciler, migrations; head, workers and submitter of at least one model
    for title, pod in pods:
        try:
            problems += [f"{title}: {warning}" for warning in api.create(pod, dry_run=True).warnings]
        except ApiError as error:
            problems.append(f"{title}: {error}")
    assert problems == []


@EACH_STACK_WITH_PODS
@pytest.mark.usefixtures("namespaces")
def test_wrong_objects_are_refused_or_cause_a_warning(given: tuple[Manifest, ...], api: KubernetesApi) -> None:
    deployment = copy.deepcopy(next(each.body for each in given if each.kind == "Deployment" and each.name == "api"))
    template = deployment["spec"]["template"]
    template["spec"]["securityContext"] = {"runAsUser": 0}
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": template["spec"]}
    metadata = {"name": "root", "namespace": deployment["metadata"]["namespace"]}
    with pytest.raises(ApiError, match='violates PodSecurity "restricted'):
        api.create({**pod, "metadata": metadata}, dry_run=True)
    (warning,) = api.create(deployment, dry_run=True).warnings
    assert "would violate PodSecurity" in warning
    rayjob = copy.deepcopy(next(each for each in given if each.template_of))
    rayjob.body["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["maxReplicas"] = "many"
    with pytest.raises(ApiError, match="maxReplicas"):
        tried(api, rayjob)


def pods_of(given: tuple[Manifest, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    for each in given:
        for number, (namespace, template) in enumerate(templates(each.body, each.namespace)):
            metadata = {**template.get("metadata", {}), "namespace": namespace, "name": f"pod-{number}"}
            yield (
                f"{each.title} pod {number}",
                {"apiVersion": "v1", "kind": "Pod", "metadata": metadata} | {"spec": template["spec"]},
            )


def templates(value: Any, namespace: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every pod template inside a value."""
    if isinstance(value, dict):
        for key, item in value.items():
            is_template = key == "template" or key.endswith("PodTemplate")
            if is_template and isinstance(item, dict) and "containers" in item.get("spec", {}):
                yield namespace, item
            else:
                yield from templates(item, namespace)
    elif isinstance(value, list):
        for item in value:
            yield from templates(item, namespace)
