"""Checks with temporary pods: what they read from a stack file, and their findings on what pods and events report."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client import ApiClient

from ray_job.contract.accelerators import ACCELERATORS
from service.doctor.cluster_api import ClusterApi
from service.doctor.findings import Result
from service.doctor.preflight.clocks import clock_finding
from service.doctor.preflight.egress import Row, egress_findings, parse_destination, write_report
from service.doctor.preflight.gpus import driver_finding, gpu_findings
from service.doctor.preflight.images import pull_finding
from service.doctor.preflight.network import Source, check_policies, check_under_policies, stack_policies
from service.doctor.preflight.plugins import NetworkPlugin
from service.doctor.preflight.stack_facts import Pool, read_stack_facts
from service.doctor.preflight.temporary_pods import Cluster, TestPod
from service.errors import SettingsError

DEV = Path(__file__).parents[2] / "Pulumi.dev.yaml"
NOW = datetime(2030, 1, 31, 12, tzinfo=UTC)


def changed(directory: Path, **sections: Any) -> Path:
    raw = yaml.safe_load(DEV.read_text())
    raw["config"] |= {f"cloister:{name}": value for name, value in sections.items()}
    file = directory / "Pulumi.dev.yaml"
    file.write_text(yaml.safe_dump(raw))
    return file


def test_stack_file_names_cluster_namespace_and_images() -> None:
    facts = read_stack_facts(DEV)
    assert (facts.context, facts.namespace, facts.start_limit_s) == ("dev-cluster", "cloister-acme-dev", 1800)
    assert {pool.name: len(pool.images) for pool in facts.pools} == {"system": 1, "cpu": 1}
    assert facts.storage_classes == {"database.volume.storage_class": "", "object_store.volume.storage_class": ""}


def test_gpu_nodes_alone_pull_all_images_from_the_mirror(tmp_path: Path) -> None:
    raw = yaml.safe_load(DEV.read_text())["config"]["cloister:images"]
    images = {**raw, "ray_cuda13": {"image": "quay.io/a/ray@sha256:1"}, "mirror": "mirror.acme.example/m"}
    pool = {"accelerator": "a10g", "nodes": ["gpu-1"], "spare_cpus": 8, "resource": "nvidia.com/a10g"}
    file = changed(tmp_path, images=images, node_pools={"runtime_class": "nvidia", "large": pool})
    (found,) = read_stack_facts(file).pools
    assert (found.name, found.runtime_class, len(found.images)) == ("large", "nvidia", 3)
    assert found.accelerator is not None
    assert found.accelerator.resource == "nvidia.com/a10g"
    assert found.images[0] == "mirror.acme.example/m/a/ray@sha256:1"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, ("", "")),
        ({"ingress": {"controller": "traefik"}}, ("traefik", "traefik")),
        ({"ingress": {"controller": "nginx", "class_name": "a", "controller_namespace": "b"}}, ("a", "b")),
        ({"ingress": {"controller": "haproxy", "controller_networks": ["10.0.0.0/24"]}}, ("haproxy", "")),
        ({"gateway": {"gateway": "edge/public"}}, ("", "")),
        ({"gateway": {"gateway": "edge/public", "controller_namespace": "b"}}, ("", "b")),
    ],
)
def test_ingress_class_and_namespace_are_those_of_the_controller(
    tmp_path: Path, section: dict[str, Any], expected: tuple[str, str]
) -> None:
    facts = read_stack_facts(changed(tmp_path, api=section))
    assert (facts.ingress_class, facts.controller_namespace) == expected
    assert (facts.gateway, facts.gateway_listener) == ("edge/public" if "gateway" in section else "", "https")


@pytest.mark.parametrize(
    ("plugin", "rule"),
    [("cilium", {"toEntities": ["kube-apiserver"]}), ("calico", {"action": "Allow"})],
)
def test_policies_of_the_network_plugin_allow_the_api_server_without_its_addresses(
    tmp_path: Path, plugin: str, rule: dict[str, Any]
) -> None:
    facts = read_stack_facts(changed(tmp_path, network={"plugin": plugin}))
    plain, own = [], []
    for each in stack_policies(facts):
        (plain if "podSelector" in each["spec"] else own).append(each)
    assert {each["metadata"]["name"] for each in own} == {"ray-head", "reconciler"}
    assert all(rule.items() <= each["spec"]["egress"][0].items() for each in own)
    assert "ipBlock" not in str(plain)


@pytest.mark.parametrize("text", ["{", "[]", "config: {}", "config: {cloister:customer: acme}"])
def test_incomplete_stack_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "Pulumi.x.yaml").write_text(text)
    with pytest.raises(SettingsError, match="is not a complete stack file"):
        read_stack_facts(tmp_path / "Pulumi.x.yaml")


def test_gpu_pod_requests_one_gpu_of_its_runtime_class() -> None:
    spec = TestPod(name="a", image="b", node="n", runtime_class="nvidia", gpu_resource="nvidia.com/gpu").body()["spec"]
    assert spec["runtimeClassName"] == "nvidia"
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "runtimeClassName" not in TestPod(name="a", image="b").body()["spec"]


# Texts as nvidia-smi and torch print them. No test runs on GPU hardware.
A10G = Pool(name="a10g", nodes=("g",), labels={}, images=("i",), accelerator=ACCELERATORS["a10g"])
ANSWER: dict[str, Any] = {
    "devices": ["/dev/nvidia0", "/dev/nvidiactl"],
    "smi": "NVIDIA A10G, 580.65.06, 23028, 8.6",
    "torch": {"name": "NVIDIA A10G", "memory_mib": 22_502, "capability": [8, 6]},
    "error": "",
}


def gpu(**changes: Any) -> dict[str, tuple[Result, str]]:
    found = gpu_findings(A10G, ACCELERATORS["a10g"], {**ANSWER, **changes})
    return {each.check: (each.result, each.message) for each in found}


def test_gpu_of_the_table_is_right() -> None:
    assert {result for result, _ in gpu().values()} == {Result.OK}


def test_gpu_with_less_memory_than_the_table_is_a_warning() -> None:
    result, message = gpu(smi="NVIDIA A10G, 580.65.06, 22528, 8.6")["GPU of a10g"]
    assert result == Result.WARNING
    assert message.endswith("set `node_pools.a10g.gpu_memory_gib: 22`")


def test_other_gpu_and_old_driver_are_failures() -> None:
    torch = {"name": "Tesla T4", "memory_mib": 14_900, "capability": [7, 5]}
    found = gpu(smi="Tesla T4, 570.1, 15360, 7.5", torch=torch)
    assert "the table has compute capability 8.6 and the table has a A10G" in found["GPU of a10g"][1]
    assert found["driver of a10g"][0] == Result.FAILED
    assert "is older than 580, which the image `images.ray_cuda13` needs" in found["driver of a10g"][1]


def test_pod_without_a_device_names_the_runtime_class() -> None:
    error = "RuntimeError: Found no NVIDIA driver on your system."
    ((result, message),) = gpu(devices=[], smi="No such file", torch=None, error=error).values()
    assert result == Result.FAILED
    assert "The pod has no /dev/nvidia* device: set `node_pools.a10g.runtime_class`" in message


def test_memory_without_nvidia_smi_is_that_of_torch() -> None:
    assert list(gpu(smi="[Errno 2] No such file or directory: 'nvidia-smi'")) == ["GPU of a10g"]


@pytest.mark.parametrize(
    ("driver", "result"), [("525.60.13", Result.OK), ("520.1", Result.FAILED), ("unknown", Result.NOT_CHECKED)]
)
def test_driver_of_a_v100(driver: str, result: Result) -> None:
    assert driver_finding("driver", driver, ACCELERATORS["v100"]).result == result


PULLED = 'Successfully pulled image "a@sha256:1" in {} ({} including waiting). Image size: 10737418240 bytes.'


@pytest.mark.parametrize(
    ("duration", "result", "text"),
    [
        ("850ms", Result.OK, "in 1 s (10.0 GiB)"),
        ("12.5s", Result.OK, "in 12 s"),
        ("16m40.1s", Result.WARNING, "more than half"),
        ("1h0m2.1s", Result.FAILED, "raise `jobs.start_limit_s`, now 1800"),
    ],
)
def test_pull_is_compared_with_the_start_limit(duration: str, result: Result, text: str) -> None:
    found = pull_finding("image", "node-1", PULLED.format(duration, duration), limit_s=1800)
    assert found.result == result
    assert text in found.message
    present = 'Container image "a" already present on machine'
    assert "not measured" in pull_finding("image", "node-1", present, limit_s=1800).message


@pytest.mark.parametrize(
    ("skew", "result"),
    [(1.0, Result.OK), (-8.0, Result.WARNING), (-300.0, Result.FAILED), (None, Result.NOT_CHECKED)],
)
def test_clock(skew: float | None, result: Result) -> None:
    assert clock_finding("clock of node-1", skew).result == result


def row(found: Any, *, expected: Any = "closed", control: Any = "open", own_node: bool = False) -> Row:
    destination = parse_destination("[fd00::1]:443")
    if own_node:
        destination = type(destination)(name="kubelet", host="10.0.0.1", port=10250, on_own_node=True)
    return Row(
        source="ray-head",
        destination=destination,
        expected=expected,
        found=found,
        without_policies=control,
        address="fd00::1",
        seconds=0.1,
        time=NOW,
    )


def test_egress_is_compared_with_the_policies() -> None:
    (ok,) = egress_findings([row("no answer"), row("unreachable", control="unreachable")])
    assert ok.message == "2 destinations as expected. Of 2 closed ones a pod without policies reaches 1"
    (leak,) = egress_findings([row("open")])
    assert leak.result == Result.FAILED
    assert "outside of the cluster at [fd00::1]:443, which the policies forbid" in leak.message
    (missing,) = egress_findings([row("no answer", expected="open")])
    assert "does not reach outside of the cluster at [fd00::1]:443 (no answer)" in missing.message
    (own_node,) = egress_findings([row("open", own_node=True)])
    assert own_node.result == Result.WARNING


def test_report_states_each_destination_with_its_time(tmp_path: Path) -> None:
    file = write_report(tmp_path / "new", [row("open")], cluster="https://10.0.0.1", namespace="a", now=NOW)
    text, record = file.read_text(), json.loads(file.with_suffix(".json").read_text())
    assert file.name == "egress-20300131T120000Z.md"
    assert "| [fd00::1]:443 | closed | open | **no** | 2030-01-31T12:00:00+00:00 |" in text
    assert "**1 differ from the policies.**" in text
    assert (record["as_expected"], record["rows"][0]["found"]) == (False, "open")


@pytest.mark.parametrize("text", ["1.1.1.1", ":443", "a:b"])
def test_destination_needs_host_and_port(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        parse_destination(text)


KUBECTL = """#!/bin/sh
cat >/dev/null
head -n 1 '{answers}'
[ "$(wc -l <'{answers}')" -le 1 ] || sed -i 1d '{answers}'
"""
RAY = Source(role="ray-head", namespace="stack", pod="ray-head", address="10.0.0.1", node_address="10.1.0.1")
PEER = Source(role="peer", namespace="peers", pod="peer", address="10.0.0.2", node_address="10.1.0.2")
CILIUM = NetworkPlugin(name="Cilium", to_enforce="Enable it", to_reach_nodes="`policyCIDRMatchMode: nodes`")


@pytest.fixture
def pods(tmp_path: Path) -> Callable[..., Cluster]:
    """Return pods whose programs print these answers in turn, the last one again and again."""

    def make(*answers: list[dict[str, str]]) -> Cluster:
        (tmp_path / "answers").write_text("".join(json.dumps({"results": each}) + "\n" for each in answers))
        program = tmp_path / "kubectl"
        program.write_text(KUBECTL.format(answers=tmp_path / "answers"))
        program.chmod(0o755)
        return Cluster(api=ClusterApi(ApiClient()), kubectl=[str(program)])

    return make


def test_policies_may_take_a_moment_until_they_are_enforced(pods: Callable[..., Cluster]) -> None:
    opened, closed = [{"found": "open"}], [{"found": "no answer"}]
    cluster = pods(opened, opened, closed, opened, closed)
    (found,) = check_policies(cluster, RAY, PEER, plugin=CILIUM, settle_s=30)
    assert found.message.startswith("Cilium enforces them in both directions")


def test_open_direction_under_policies_names_the_remedy_of_the_plugin(pods: Callable[..., Cluster]) -> None:
    cluster = pods([{"found": "no answer"}], [{"found": "open"}])
    (found,) = check_policies(cluster, RAY, PEER, plugin=CILIUM, settle_s=0)
    assert found.result == Result.FAILED
    assert "ingress of a pod with a Ray pod's labels stays open under default-deny. Enable it" in found.message


def test_api_server_and_dns_closed_by_the_policies_name_their_settings(pods: Callable[..., Cluster]) -> None:
    cluster = pods([{"found": "no answer", "address": "10.0.0.9"}, {"found": "no address", "address": ""}])
    server = parse_destination("10.0.0.9:443")
    kubernetes, dns = check_under_policies(cluster, read_stack_facts(DEV), RAY, server, CILIUM)
    assert "though `network.kubernetes_api` allows 10.0.0.10/32, port 6443" in kubernetes.message
    assert kubernetes.message.endswith("`policyCIDRMatchMode: nodes`")
    assert "`network.dns_namespace` (now kube-system)" in dns.message
