"""Alerts and dashboards use metrics that the processes of the service expose."""

import dataclasses
import re

import pytest
from prometheus_client import generate_latest

from infra.monitoring.alerts import ALERTS, promql
from infra.monitoring.dashboards import MODELS, OVERVIEW
from service.api.app import create_app
from service.coordinator.app import create_app as create_coordinator
from service.reconciler.health import metrics_registry
from service.workspace import Workspace
from tests.integration.reconciler_harness import Stack

EXPRESSIONS = {alert.name: promql(alert.expression, "acme") for alert in ALERTS} | {
    panel.title: panel.expression for panel in (*OVERVIEW, *MODELS)
}
WORDS = {"absent", "and", "histogram_quantile", "increase", "max", "min", "or", "rate", "sum"}


def metrics_in(expression: str) -> set[str]:
    """Return the names in an expression without its matchers, ranges and lists of labels."""
    rest = re.sub(r"\{[^}]*\}|\[[^]]*\]|\bby \([^)]*\)", " ", expression)
    return set(re.findall(r"[a-zA-Z_]\w*", rest)) - WORDS


@pytest.fixture
def exposed(stack: Stack) -> set[str]:
    """The names of all time series that a stack exposes."""
    backends = dataclasses.replace(stack.backends, workspace=Workspace(size_bytes=1))
    api = create_app(backends)
    api.build_middleware_stack()  # as before the first request
    registries = (
        api.state.metrics,
        create_coordinator(backends).state.metrics,
        metrics_registry(backends),
    )
    text = "".join(generate_latest(registry).decode() for registry in registries)
    kinds = re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)
    parts = ("_bucket", "_sum", "_count")
    return {name + part for name, kind in kinds for part in (parts if kind == "histogram" else ("",))}


def test_expressions_name_metrics_that_exist(exposed: set[str]) -> None:
    assert {name: metrics_in(text) - exposed for name, text in EXPRESSIONS.items() if metrics_in(text) - exposed} == {}
    assert all(metrics_in(text) for text in EXPRESSIONS.values())


def test_metric_that_does_not_exist_is_found(exposed: set[str]) -> None:
    text = 'max by (namespace) (cloister_queue_age_seconds{a="b"}) > 1 and rate(cloister_gone_total[5m]) > 0'
    assert metrics_in(text) - exposed == {"cloister_gone_total"}


def test_names_follow_the_conventions_of_prometheus(exposed: set[str]) -> None:
    assert all(re.fullmatch(r"cloister_[a-z_]+", name) for name in exposed)
    assert not [name for name in exposed if re.search(r"_(ms|minutes|hours|kb|mib|gib)(_|$)", name)]
