"""Alerts of a stack, as rules of Prometheus. docs/runbook.md has a section for each.

A counter or gauge that several processes read from the database is aggregated with ``max``. Rules of a stack select its
namespace, because a Prometheus may have the metrics of several stacks.
"""

from dataclasses import dataclass
from string import Template
from typing import Any, Final, Literal

RUNBOOK: Final = "docs/runbook.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert.

    Attributes:
        name: its name, and in lower case the anchor of its section in the runbook.
        expression: PromQL; ``$stack`` is the matcher of a stack's namespace.
        minutes: how long the expression holds before the alert fires.
        severity: ``critical`` if batches or requests stop, ``warning`` otherwise.
        summary: the symptom, in one sentence.
    """

    name: str
    expression: str
    minutes: int
    severity: Literal["critical", "warning"]
    summary: str

    def rule(self, *, namespace: str, runbook_url: str) -> dict[str, Any]:
        """Return the alerting rule. Source: https://prometheus.io/docs/prometheus/3.5/configuration/alerting_rules/.

        Args:
            namespace: namespace of the service; empty for a Prometheus with one stack.
            runbook_url: address of the runbook.
        """
        return {
            "alert": self.name,
            "expr": promql(self.expression, namespace),
            "for": f"{self.minutes}m",
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook_url": f"{runbook_url}#{self.name.lower()}"},
        }


def promql(expression: str, namespace: str) -> str:
    """Return an expression for a namespace; for all namespaces if it is empty."""
    return Template(expression).substitute(stack=f'namespace="{namespace}"' if namespace else "").replace(",}", "}")


def _failed_share(counter: str, *matchers: str) -> str:
    matched = ",".join((*matchers, "$stack"))
    failed = f'sum by (namespace) (rate({counter}{{status=~"5..",{matched}}}[5m]))'
    return f"{failed} / sum by (namespace) (rate({counter}{{{matched}}}[5m])) > 0.05"


ALERTS: Final = (
    Alert(
        name="CloisterApiDown",
        expression='absent(cloister_build_info{component="api",$stack})',
        minutes=2,
        severity="critical",
        summary="No API process answers Prometheus.",
    ),
    Alert(
        name="CloisterApiErrors",
        expression=_failed_share("cloister_http_requests_total", 'route!~"/healthz|/readyz|/metrics"'),
        minutes=5,
        severity="warning",
        summary="The API answers more than 5 % of requests with a server error.",
    ),
    Alert(
        name="CloisterReconcilerNotLeading",
        expression="max by (namespace) (cloister_reconciler_leading{$stack}) == 0 "
        "or absent(cloister_reconciler_leading{$stack})",
        minutes=2,
        severity="critical",
        summary="No reconciler leads: batches make no progress beyond what running jobs hold.",
    ),
    Alert(
        name="CloisterReconcilerStalled",
        expression="max by (namespace) (cloister_reconcile_lag_seconds{$stack}) > 60 "
        "and max by (namespace) (cloister_reconciler_leading{$stack}) == 1",
        minutes=2,
        severity="critical",
        summary="The leading reconciler has not looked at the batches for a minute.",
    ),
    Alert(
        name="CloisterReconcilerStepsFail",
        expression='sum by (namespace) (increase(cloister_reconciler_step_failures_total{kind!~"ObjectStore.*",$stack}'
        "[10m])) > 10",
        minutes=5,
        severity="warning",
        summary="Steps of batches or jobs fail and are repeated.",
    ),
    Alert(
        name="CloisterCoordinatorDown",
        expression='absent(cloister_build_info{component="coordinator",$stack})',
        minutes=2,
        severity="critical",
        summary="No coordinator answers Prometheus: jobs get no work and cannot commit.",
    ),
    Alert(
        name="CloisterCoordinatorErrors",
        expression=_failed_share("cloister_coordinator_requests_total"),
        minutes=5,
        severity="warning",
        summary="The coordinator answers more than 5 % of the jobs' requests with a server error.",
    ),
    Alert(
        name="CloisterDatabaseUnreachable",
        expression="min by (namespace) (cloister_database_up{$stack}) == 0",
        minutes=2,
        severity="critical",
        summary="An API process cannot reach the database.",
    ),
    Alert(
        name="CloisterObjectStoreErrors",
        expression='min by (namespace) (cloister_check_ok{check="object_store",$stack}) == 0 '
        'or sum by (namespace) (increase(cloister_reconciler_step_failures_total{kind=~"ObjectStore.*",$stack}[10m])) '
        "> 3",
        minutes=2,
        severity="critical",
        summary="The object store fails for the API or the reconciler.",
    ),
    Alert(
        name="CloisterBatchesAtRisk",
        expression="max by (namespace, model) (cloister_batches_at_risk{$stack}) > 0",
        minutes=10,
        severity="warning",
        summary="Batches may expire before they are done.",
    ),
    Alert(
        name="CloisterQueueStuck",
        expression="max by (namespace, accelerator) (cloister_job_queue_age_seconds{$stack}) > 300 "
        "and (max by (namespace, accelerator) (cloister_job_slots{$stack}) "
        "> max by (namespace, accelerator) (cloister_job_slots_used{$stack}))",
        minutes=5,
        severity="warning",
        summary="A job waits for its launch although a slot is free.",
    ),
    Alert(
        name="CloisterJobsFail",
        expression="max by (namespace, model) (cloister_job_failures_in_a_row{$stack}) >= 2",
        minutes=1,
        severity="warning",
        summary="Jobs of a model fail in a row; after four its batches fail.",
    ),
    Alert(
        name="CloisterEnginesRestart",
        expression="sum by (namespace, model) (increase(cloister_engine_restarts_total{$stack}[15m])) > 3",
        minutes=1,
        severity="warning",
        summary="Engines of a model die and are started again.",
    ),
    Alert(
        name="CloisterSegmentsFail",
        expression="max by (namespace) (cloister_segment_failures{$stack}) >= 2",
        minutes=5,
        severity="warning",
        summary="Jobs give segments back that they cannot run; after four times the batch fails.",
    ),
    Alert(
        name="CloisterLeaseOld",
        expression="max by (namespace) (cloister_lease_age_seconds{$stack}) > 3600",
        minutes=10,
        severity="warning",
        summary="A job has held a segment for more than an hour.",
    ),
    Alert(
        name="CloisterAuditLag",
        expression="max by (namespace) (cloister_audit_lag_seconds{$stack}) > 300",
        minutes=5,
        severity="warning",
        summary="Entries of the audit log are not sealed.",
    ),
    Alert(
        name="CloisterRetentionLag",
        expression="max by (namespace) (cloister_retention_lag_seconds{$stack}) > 3600",
        minutes=30,
        severity="warning",
        summary="Files exist more than an hour after they were due for deletion.",
    ),
    Alert(
        name="CloisterWorkspaceFull",
        expression="max by (namespace, pod) (cloister_workspace_claimed_bytes{$stack} "
        "/ cloister_workspace_size_bytes{$stack}) > 0.9",
        minutes=10,
        severity="warning",
        summary="The disk for uploads and results of a process is nearly full.",
    ),
)


def rule_groups(*, namespace: str = "", runbook_url: str = RUNBOOK) -> dict[str, Any]:
    """Return all rules in one group: a rules file, or the ``spec`` of a PrometheusRule.

    Args:
        namespace: namespace of the service; empty for a Prometheus with one stack.
        runbook_url: address of the runbook.
    """
    rules = [alert.rule(namespace=namespace, runbook_url=runbook_url) for alert in ALERTS]
    return {"groups": [{"name": "cloister", "rules": rules}]}
