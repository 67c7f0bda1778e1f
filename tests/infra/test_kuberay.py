"""Chart of KubeRay's operator."""

from typing import Any

import pytest

from infra.capacity.pools import NodePool, placement
from infra.kubernetes.images import ImageReference
from infra.rendering.recording import record
from infra.shared_platform.kuberay import KubeRay, KubeRayArgs, operator_egress, operator_values
from tests.infra.previewed_stacks import changed, preview_values, stack_text
from tests.infra.ray_job_args import NAMES

IMAGE = ImageReference.parse("registry.example/kuberay/operator@sha256:" + "a" * 64)


def args(**changes: Any) -> KubeRayArgs:
    wanted: dict[str, Any] = {
        "names": NAMES,
        "repository": "oci://registry.example/charts",
        "version": "1.6.1",
        "namespace": "kuberay-system",
        "image": IMAGE,
        "placement": placement(NodePool(name="system")),
        "jobs_namespaces": ("cloister-acme-dev-jobs",),
        "kubernetes_api": ("10.0.0.1/32",),
    }
    return KubeRayArgs(**wanted | changes)


@pytest.mark.parametrize(
    ("repository", "source"),
    [
        ("oci://registry.example/charts/", {"chart": "oci://registry.example/charts/kuberay-operator"}),
        (
            "https://charts.example",
            {"chart": "kuberay-operator", "repositoryOpts": {"repo": "https://charts.example"}},
        ),
    ],
)
def test_chart_source_follows_the_repository(repository: str, source: dict[str, Any]) -> None:
    recording = record(lambda: KubeRay("kuberay", args(repository=repository)) and None)
    [chart] = recording.of_type("kubernetes:helm.sh/v4:Chart")
    assert {key: chart.inputs[key] for key in ("chart", "repositoryOpts") if key in chart.inputs} == source


@pytest.mark.parametrize("skip_crds", [False, True])
def test_definitions_are_part_of_the_stack_unless_they_are_skipped(*, skip_crds: bool) -> None:
    values = changed(kuberay={"chart": {"skip_crds": skip_crds}})
    [chart] = preview_values(values, stack_text().secret_keys).of_type("kubernetes:helm.sh/v4:Chart")
    assert chart.inputs["skipCrds"] is skip_crds


def test_operator_image_has_a_digest() -> None:
    image = operator_values(args())["image"]
    assert f"{image['repository']}:{image['tag']}" == str(IMAGE)  # as the chart writes it


def test_deletion_rules_of_rayjobs_are_enabled() -> None:
    gates = {gate["name"]: gate["enabled"] for gate in operator_values(args())["featureGates"]}
    assert gates["RayJobDeletionPolicy"] is True


def test_values_do_not_override_labels_of_the_chart() -> None:
    assert set(operator_values(args())["labels"]) == {"cloister.dev/customer", "cloister.dev/environment"}


@pytest.mark.parametrize(
    ("customers", "watched"),
    [(("cloister-acme-dev-jobs",), ["cloister-acme-dev-jobs"]), ((), ["kuberay-system"])],
)
def test_operator_watches_the_namespaces_of_jobs_only(customers: tuple[str, ...], watched: list[str]) -> None:
    assert operator_values(args(jobs_namespaces=customers))["watchNamespace"] == watched


def test_operator_depends_on_its_namespace_and_pull_secret() -> None:
    recording = record(lambda: KubeRay("kuberay", args(docker_config="{}")) and None)
    chart = recording.of_type("kubernetes:helm.sh/v4:Chart")[0]
    assert (chart.inputs["version"], chart.inputs["namespace"]) == ("1.6.1", "kuberay-system")
    assert chart.inputs["values"]["imagePullSecrets"] == [{"name": "image-pull"}]
    assert {"kuberay-system", "kuberay-system-image-pull"} <= {urn.rpartition("::")[2] for urn in chart.dependencies}


def test_namespace_of_the_operator_enforces_the_restricted_profile() -> None:
    recording = record(lambda: KubeRay("kuberay", args()) and None)
    labels = recording.named("kuberay-system").inputs["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_operator_reaches_heads_dns_and_api_server_and_has_no_ingress() -> None:
    recording = record(lambda: KubeRay("kuberay", args()) and None)
    closed, opened = (recording.named(f"kuberay-system-{name}").inputs["spec"] for name in ("default-deny", "kuberay"))
    assert (closed["ingress"], closed["egress"], opened["ingress"]) == ([], [], [])
    assert [[port["port"] for port in rule["ports"]] for rule in opened["egress"]] == [[6443], [8265], [53, 53]]


def test_operator_reaches_a_dns_cache() -> None:
    *_, names = operator_egress(args(dns_networks=("169.254.20.10/32",)))
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in names["to"]
