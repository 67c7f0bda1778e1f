"""Objects by which Prometheus Operator and Grafana find the metrics, rules and dashboards of a stack.

Source: https://prometheus-operator.dev/docs/api-reference/api/ (0.85)
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pulumi
from pulumi_kubernetes import apiextensions, core

from infra.kubernetes.naming import StackNames
from infra.monitoring.alerts import RUNBOOK, rule_groups
from infra.monitoring.dashboards import dashboards
from infra.stack_file.sections import MonitoringSection
from ray_job.contract.cluster import API, COORDINATOR, RECONCILER
from ray_job.contract.rayjobs import JOB_LABEL

_GROUP: Final = "monitoring.coreos.com/v1"
_COMPONENT: Final = "monitoring"
# The label that the sidecar of Grafana's chart selects by default.
_DASHBOARD_LABEL: Final = {"grafana_dashboard": "1"}


def operator_objects(names: StackNames, section: MonitoringSection) -> Iterator[dict[str, Any]]:
    """Yield the monitors and the rules for Prometheus Operator.

    Args:
        names: names of the stack.
        section: the section ``monitoring`` of the stack file.
    """

    def manifest(kind: str, name: str, spec: Mapping[str, Any], *, in_jobs: bool = False) -> dict[str, Any]:
        namespace = names.jobs_namespace if in_jobs else names.service_namespace
        labels = {**names.labels(_COMPONENT), **section.object_labels}
        metadata = {"name": name, "namespace": namespace, "labels": labels}
        return {"apiVersion": _GROUP, "kind": kind, "metadata": metadata, "spec": dict(spec)}

    yield manifest("ServiceMonitor", API, _service(names.selector(API), "http"))
    yield manifest("PodMonitor", RECONCILER, _pods(names.selector(RECONCILER), "http"))
    yield manifest("PodMonitor", COORDINATOR, _pods(names.selector(COORDINATOR), "metrics"))
    ray = _pods({"ray.io/is-ray-node": "yes"}, "metrics") | {"podTargetLabels": [JOB_LABEL, "ray.io/node-type"]}
    yield manifest("PodMonitor", "ray", ray, in_jobs=True)
    if section.dcgm_namespace:
        # The Service of NVIDIA's GPU Operator.
        exporter = _service({"app": "nvidia-dcgm-exporter"}, "gpu-metrics")
        exporter["namespaceSelector"] = {"matchNames": [section.dcgm_namespace]}
        yield manifest("ServiceMonitor", "dcgm-exporter", exporter)
    groups = rule_groups(namespace=names.service_namespace, runbook_url=section.runbook_url or RUNBOOK)
    yield manifest("PrometheusRule", "alerts", groups)


def dashboard_config_maps(names: StackNames) -> Iterator[dict[str, Any]]:
    """Yield a ConfigMap for each dashboard."""
    for file, dashboard in dashboards().items():
        metadata = {
            "name": f"dashboard-{file.removesuffix('.json')}",
            "namespace": names.service_namespace,
            "labels": {**names.labels(_COMPONENT), **_DASHBOARD_LABEL},
        }
        yield {"metadata": metadata, "data": {file: json.dumps(dashboard, indent=1)}}


class Monitoring(pulumi.ComponentResource):
    """Monitors, rules and dashboards, as far as the stack file asks for them."""

    def __init__(
        self, name: str, names: StackNames, section: MonitoringSection, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        super().__init__("cloister:monitoring:Monitoring", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        for manifest in operator_objects(names, section) if section.prometheus == "operator" else ():
            apiextensions.CustomResource(
                f"{manifest['metadata']['name']}-{manifest['kind'].lower()}",
                api_version=manifest["apiVersion"],
                kind=manifest["kind"],
                metadata=manifest["metadata"],
                spec=manifest["spec"],
                opts=child,
            )
        for manifest in dashboard_config_maps(names) if section.dashboards else ():
            core.v1.ConfigMap(manifest["metadata"]["name"], **manifest, opts=child)
        self.register_outputs({})


def _service(labels: Mapping[str, str], port: str) -> dict[str, Any]:
    return {"selector": {"matchLabels": dict(labels)}, "endpoints": [{"port": port, "path": "/metrics"}]}


def _pods(labels: Mapping[str, str], port: str) -> dict[str, Any]:
    return {"selector": {"matchLabels": dict(labels)}, "podMetricsEndpoints": [{"port": port, "path": "/metrics"}]}
