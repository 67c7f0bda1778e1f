"""The section ``monitoring``: who may read metrics, and the objects for Prometheus Operator and Grafana."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from infra.monitoring.alerts import ALERTS
from infra.rendering import monitoring_files
from infra.rendering.recording import Recording
from infra.stack_file.reading import ConfigError
from tests.infra.previewed_stacks import ROOT, changed, parse, preview, preview_values, stack_text

PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}


def with_monitoring(**section: Any) -> Recording:
    return preview_values(changed(monitoring=section), stack_text().secret_keys)


def metrics_ports(recording: Recording) -> dict[str, list[tuple[dict[str, Any], int]]]:
    """The peers outside the stack that a policy lets in as Prometheus, with their ports, by the pods they reach."""
    found: dict[str, list[tuple[dict[str, Any], int]]] = {}
    for policy in recording.of_type("networking.k8s.io/v1:NetworkPolicy"):
        for rule in policy.inputs["spec"]["ingress"]:
            for peer in rule["from"]:
                if "metrics" in str(peer) or "monitoring" in str(peer):
                    [port] = rule["ports"]
                    found.setdefault(policy.inputs["metadata"]["name"], []).append((peer, int(port["port"])))
    return found


def test_no_pod_reads_metrics_without_the_section() -> None:
    recording = preview("dev")
    assert metrics_ports(recording) == {}
    assert not [each for each in recording.resources if "monitoring.coreos.com" in each.type]


@pytest.mark.parametrize("kind", ["none", "operator"])
def test_exactly_the_pods_of_prometheus_reach_the_ports_of_metrics(kind: str) -> None:
    recording = with_monitoring(prometheus=kind, namespace="metrics")
    peer = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "metrics"}},
        "podSelector": {"matchLabels": PROMETHEUS},
    }
    expected = {"api": 8000, "reconciler": 8001, "coordinator": 8101, "ray": 8080}
    assert metrics_ports(recording) == {name: [(peer, port)] for name, port in expected.items()}
    policies = recording.of_type("networking.k8s.io/v1:NetworkPolicy")
    assert "metrics" not in {policy.inputs["metadata"]["namespace"] for policy in policies}


def test_prometheus_without_labels_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"monitoring\.pod_labels"):
        parse(changed(monitoring={"pod_labels": {}}))


def test_dcgm_exporter_needs_the_operator() -> None:
    with pytest.raises(ConfigError, match=r"monitoring\.dcgm_namespace: needs a ServiceMonitor"):
        parse(changed(monitoring={"dcgm_namespace": "gpu-operator"}))


def test_earlier_name_of_the_namespace_points_to_the_section() -> None:
    network = dict(changed()["network"]) | {"monitoring_namespace": "monitoring"}
    with pytest.raises(ConfigError, match=r"network\.monitoring_namespace: was renamed; use the section monitoring"):
        parse(changed(network=network))


def of_operator(recording: Recording, kind: str) -> dict[str, dict[str, Any]]:
    return {
        each.inputs["metadata"]["name"]: each.inputs for each in recording.of_type(f"monitoring.coreos.com/v1:{kind}")
    }


def test_monitors_name_ports_that_their_pods_have() -> None:
    recording = preview("v100-and-a10g")
    monitors = of_operator(recording, "PodMonitor")
    for name in ("reconciler", "coordinator"):
        [deployment] = [each for each in recording.of_type("Deployment") if each.inputs["metadata"]["name"] == name]
        template = deployment.inputs["spec"]["template"]
        [endpoint] = monitors[name]["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert monitors[name]["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert monitors["ray"]["metadata"]["namespace"] == "cloister-acme-prod-jobs"
    assert set(of_operator(recording, "ServiceMonitor")) == {"api", "dcgm-exporter"}
    assert all(each["metadata"]["labels"]["release"] == "kube-prometheus-stack" for each in monitors.values())


def test_ray_nodes_export_metrics_on_the_port_that_prometheus_reaches() -> None:
    templates = next(each for each in preview("v100-and-a10g").of_type("ConfigMap") if each.name == "ray-job-templates")
    cluster = json.loads(next(iter(templates.inputs["data"].values())))["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["rayStartParams"]["metrics-export-port"] == "8080"
        # KubeRay adds the port `metrics` to each pod, and other ports of a head only if none is declared.
        assert "ports" not in group["template"]["spec"]["containers"][0]


def test_rules_of_a_stack_select_its_namespace_and_link_to_its_runbook() -> None:
    url = "https://wiki.acme.example/runbook"
    recording = with_monitoring(prometheus="operator", runbook_url=url)
    [rules] = of_operator(recording, "PrometheusRule").values()
    for rule in rules["spec"]["groups"][0]["rules"]:
        series = re.findall(r"cloister_\w+(?:\{[^}]*\})?", rule["expr"])
        assert series
        assert all('namespace="cloister-acme-dev"' in each for each in series), rule["alert"]
        assert rule["annotations"]["runbook_url"] == f"{url}#{rule['alert'].lower()}"


def test_dashboards_are_created_only_if_they_are_asked_for() -> None:
    label = {"grafana_dashboard": "1"}

    def found(recording: Recording) -> list[str]:
        maps = recording.of_type("ConfigMap")
        return [each.name for each in maps if label.items() <= each.inputs["metadata"]["labels"].items()]

    assert found(with_monitoring()) == []
    assert found(with_monitoring(dashboards=True)) == ["dashboard-cloister-overview", "dashboard-cloister-models"]


@pytest.mark.parametrize("path", monitoring_files.files(), ids=lambda path: path.name)
def test_generated_files_are_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == monitoring_files.files()[path]


def test_each_alert_has_a_section_in_the_runbook() -> None:
    text = (ROOT / "docs/runbook.md").read_text()
    sections = dict(re.findall(r"^## (Cloister\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == [alert.name for alert in ALERTS]
    for alert in ALERTS:
        parts = re.findall(r"^\*\*(\w+)\.\*\*", sections[alert.name], re.MULTILINE)
        assert parts == ["Symptom", "Meaning", "Commands", "Remedy"], alert.name
