"""Dashboards of Grafana. Their expressions follow the rules of ``infra.monitoring.alerts``."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

_NAMESPACE: Final = 'namespace=~"$namespace"'
_OF_MODEL: Final = f'{_NAMESPACE},model=~"$model"'
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A time series.

    Attributes:
        title: what it shows.
        expression: PromQL.
        legend: name of each line, with labels in double braces.
        unit: unit of Grafana.
    """

    title: str
    expression: str
    legend: str
    unit: str = "short"


def _rate(by: str, counter: str, matchers: str) -> str:
    # Leader and standby report the same counter.
    return f"max by ({by}) (rate({counter}{{{matchers}}}[$__rate_interval]))"


OVERVIEW: Final = (
    Panel(title="Batches by state", expression=f"max by (status) (cloister_batches{{{_NAMESPACE}}})",
          legend="{{status}}"),
    Panel(title="Batches at risk of their deadline",
          expression=f"max by (model) (cloister_batches_at_risk{{{_NAMESPACE}}})", legend="{{model}}"),
    Panel(title="Lines per second", expression=_rate("outcome", "cloister_lines_total", _NAMESPACE),
          legend="{{outcome}}"),
    Panel(title="Tokens per second", expression=_rate("kind", "cloister_tokens_total", _NAMESPACE),
          legend="{{kind}}"),
    Panel(title="Jobs by state", expression=f"max by (state) (cloister_jobs{{{_NAMESPACE}}})", legend="{{state}}"),
    Panel(title="GPUs in use", expression=f"max(rate(cloister_gpu_seconds_total{{{_NAMESPACE}}}[$__rate_interval]))",
          legend="GPUs"),
    Panel(title="Requests of the API per second",
          expression=f"sum by (status) (rate(cloister_http_requests_total{{{_NAMESPACE}}}[$__rate_interval]))",
          legend="{{status}}", unit="reqps"),
    Panel(title="Duration of requests, 95th percentile",
          expression="histogram_quantile(0.95, sum by (le, route) "
          f"(rate(cloister_http_request_duration_seconds_bucket{{{_NAMESPACE}}}[$__rate_interval])))",
          legend="{{route}}", unit="s"),
    Panel(title="Requests of jobs per second",
          expression="sum by (path, status) "
          f"(rate(cloister_coordinator_requests_total{{{_NAMESPACE}}}[$__rate_interval]))",
          legend="{{path}} {{status}}", unit="reqps"),
    Panel(title="Failed steps per second",
          expression="sum by (kind) "
          f"(rate(cloister_reconciler_step_failures_total{{{_NAMESPACE}}}[$__rate_interval]))", legend="{{kind}}"),
    Panel(title="Checks of /readyz", expression=f"min by (check) (cloister_check_ok{{{_NAMESPACE}}})",
          legend="{{check}}"),
    Panel(title="Workspace in use", expression=f"cloister_workspace_claimed_bytes{{{_NAMESPACE}}}", legend="{{pod}}",
          unit="bytes"),
)  # fmt: skip
MODELS: Final = (
    Panel(title="Waiting batches", expression=f"max by (model) (cloister_waiting_batches{{{_OF_MODEL}}})",
          legend="{{model}}"),
    Panel(title="Age of the oldest waiting batch",
          expression=f"max by (model) (cloister_model_queue_age_seconds{{{_OF_MODEL}}})", legend="{{model}}", unit="s"),
    Panel(title="Segments without a result", expression=f"max by (model) (cloister_open_segments{{{_OF_MODEL}}})",
          legend="{{model}}"),
    Panel(title="Ready engines", expression=f"max by (model) (cloister_engines{{{_OF_MODEL}}})", legend="{{model}}"),
    Panel(title="Rows per second", expression=f"max by (model) (cloister_rows_per_second{{{_OF_MODEL}}})",
          legend="{{model}}"),
    Panel(title="Tokens per second by project",
          expression=_rate("project_id, model, kind", "cloister_project_tokens_total", _OF_MODEL),
          legend="{{project_id}} {{model}} {{kind}}"),
    Panel(title="Share of input tokens from the prefix cache",
          expression="sum by (model) ("
          + _rate("project_id, model", "cloister_project_tokens_total", f'kind="cached",{_OF_MODEL}')
          + ") / sum by (model) ("
          + _rate("project_id, model", "cloister_project_tokens_total", f'kind="input",{_OF_MODEL}') + ")",
          legend="{{model}}", unit="percentunit"),
    Panel(title="Lines per second by outcome",
          expression="sum by (model, outcome) ("
          + _rate("project_id, model, outcome", "cloister_project_lines_total", _OF_MODEL) + ")",
          legend="{{model}} {{outcome}}"),
    Panel(title="GPUs in use by project",
          expression=_rate("project_id, model", "cloister_project_gpu_seconds_total", _OF_MODEL),
          legend="{{project_id}} {{model}}"),
    Panel(title="Failed jobs in the last hour",
          expression=f"sum by (model, reason) (increase(cloister_job_failures_total{{{_OF_MODEL}}}[1h]))",
          legend="{{model}} {{reason}}"),
    Panel(title="Restarts of engines in the last hour",
          expression=f"sum by (model) (increase(cloister_engine_restarts_total{{{_OF_MODEL}}}[1h]))",
          legend="{{model}}"),
    Panel(title="Slots in use", expression=f"max by (accelerator) (cloister_job_slots_used{{{_NAMESPACE}}})",
          legend="{{accelerator}}"),
    Panel(title="Age of the oldest job without a slot",
          expression=f"max by (accelerator) (cloister_job_queue_age_seconds{{{_NAMESPACE}}})",
          legend="{{accelerator}}", unit="s"),
)  # fmt: skip


def dashboards() -> dict[str, dict[str, Any]]:
    """Return the dashboards by the name of their file."""
    return {
        "cloister-overview.json": _dashboard("cloister-overview", "cloister: overview", OVERVIEW, variables=()),
        "cloister-models.json": _dashboard(
            "cloister-models", "cloister: models and jobs", MODELS, variables=("model",)
        ),
    }


def _dashboard(uid: str, title: str, panels: Iterable[Panel], *, variables: Iterable[str]) -> dict[str, Any]:
    """Return a dashboard in Grafana's JSON model. Source: https://grafana.com/docs/grafana/v12.0/dashboards/."""
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    queries = {"namespace": "label_values(cloister_build_info, namespace)"}
    queries |= {name: f"label_values(cloister_engines, {name})" for name in variables}
    return {
        "uid": uid,
        "title": title,
        "tags": ["cloister"],
        "schemaVersion": 39,
        "timezone": "utc",
        "refresh": "1m",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, *(_variable(name, text) for name, text in queries.items())]},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _variable(name: str, text: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": text, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    target = {"refId": "A", "datasource": _SOURCE, "expr": panel.expression, "legendFormat": panel.legend}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [target],
    }
