"""KubeRay's operator by its chart."""

from typing import Any

import pytest

from infra.images import ImageReference
from infra.kuberay import KubeRay, KubeRayArgs, chart_source, operator_egress, operator_values
from infra.pools import placement
from infra.recording import record
from tests.infra.ray_job_args import NAMES

IMAGE = ImageReference.parse("registry.example/kuberay/operator@sha256:" + "a" * 64)


def args(**changes: Any) -> KubeRayArgs:
    wanted: dict[str, Any] = {
        "names": NAMES,
        "repository": "oci://registry.example/charts",
        "version": "1.6.1",
        "namespace": "kuberay-system",
        "image": IMAGE,
        "placement": placement("system"),
        "kubernetes_api": ("10.0.0.1/32",),
    }
    return KubeRayArgs(**wanted | changes)


@pytest.mark.parametrize(
    ("repository", "source"),
    [
        ("oci://registry.example/charts/", {"chart": "oci://registry.example/charts/kuberay-operator"}),
        (
            "https://charts.example",
            {"chart": "kuberay-operator", "repository_opts": {"repo": "https://charts.example"}},
        ),
    ],
)
def test_the_chart_comes_from_where_the_stack_says(repository: str, source: dict[str, Any]) -> None:
    assert chart_source(repository) == source


def test_the_operator_runs_by_digest() -> None:
    image = operator_values(args())["image"]
    assert f"{image['repository']}:{image['tag']}" == str(IMAGE)  # as the chart writes it


def test_rayjobs_are_deleted_by_their_rules() -> None:
    gates = {gate["name"]: gate["enabled"] for gate in operator_values(args())["featureGates"]}
    assert gates["RayJobDeletionPolicy"] is True


def test_the_chart_gets_no_label_that_it_sets_itself() -> None:
    assert set(operator_values(args())["labels"]) == {"cloister.dev/customer", "cloister.dev/environment"}


def test_the_operator_waits_for_its_namespace_and_its_login() -> None:
    recording = record(lambda: KubeRay("kuberay", args(docker_config="{}")) and None)
    chart = recording.of_type("kubernetes:helm.sh/v4:Chart")[0]
    assert (chart.inputs["version"], chart.inputs["namespace"]) == ("1.6.1", "kuberay-system")
    assert chart.inputs["values"]["imagePullSecrets"] == [{"name": "image-pull"}]
    assert {"kuberay-system", "kuberay-system-image-pull"} <= {urn.rpartition("::")[2] for urn in chart.dependencies}


def test_the_operators_namespace_takes_restricted_pods_only() -> None:
    recording = record(lambda: KubeRay("kuberay", args()) and None)
    labels = recording.named("kuberay-system").inputs["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_the_operator_reaches_heads_names_and_the_api_server_and_nobody_reaches_it() -> None:
    recording = record(lambda: KubeRay("kuberay", args()) and None)
    closed, opened = (recording.named(f"kuberay-system-{name}").inputs["spec"] for name in ("default-deny", "kuberay"))
    assert (closed["ingress"], closed["egress"], opened["ingress"]) == ([], [], [])
    assert [[port["port"] for port in rule["ports"]] for rule in opened["egress"]] == [[6443], [8265], [53, 53]]


def test_the_operator_reaches_a_cache_of_names_on_each_node_too() -> None:
    *_, names = operator_egress(args(dns_networks=("169.254.20.10/32",)))
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in names["to"]
