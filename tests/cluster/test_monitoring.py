"""The alerts in Prometheus' own programs: each fault fires its alert, and a real Prometheus scrapes real processes."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from infra.monitoring.alerts import ALERTS, rule_groups
from service.local.ray_head import free_ports
from tests.cluster.build import CHECKOUT, build

NAMESPACE = "cloister-acme-dev"
HEALTHY = {
    'cloister_build_info{component="api"}': "1",
    'cloister_build_info{component="coordinator"}': "1",
    'cloister_http_requests_total{route="/v1/batches",status="200"}': "0+60",
    'cloister_http_requests_total{route="/v1/batches",status="500"}': "0+1",
    'cloister_http_requests_total{route="/readyz",status="503"}': "0+60",
    'cloister_coordinator_requests_total{path="/sync",status="200"}': "0+60",
    'cloister_coordinator_requests_total{path="/sync",status="503"}': "0+1",
    "cloister_reconciler_leading{}": "1",
    "cloister_reconcile_lag_seconds{}": "1",
    'cloister_reconciler_step_failures_total{kind="OperationalError"}': "0",
    'cloister_reconciler_step_failures_total{kind="ObjectStoreError"}': "0",
    "cloister_database_up{}": "1",
    'cloister_check_ok{check="object_store"}': "1",
    'cloister_batches_at_risk{model="m"}': "0",
    'cloister_job_queue_age_seconds{accelerator="a10g"}': "900",
    'cloister_job_slots{accelerator="a10g"}': "2",
    'cloister_job_slots_used{accelerator="a10g"}': "2",
    'cloister_job_failures_in_a_row{model="m"}': "1",
    'cloister_engine_restarts_total{model="m"}': "0",
    "cloister_segment_failures{}": "1",
    "cloister_lease_age_seconds{}": "600",
    "cloister_audit_lag_seconds{}": "5",
    "cloister_retention_lag_seconds{}": "60",
    'cloister_workspace_claimed_bytes{pod="api-1"}': "50",
    'cloister_workspace_size_bytes{pod="api-1"}': "100",
}
FAULTS: dict[str, dict[str, str | None]] = {
    "CloisterApiDown": {'cloister_build_info{component="api"}': None},
    "CloisterApiErrors": {'cloister_http_requests_total{route="/v1/batches",status="500"}': "0+30"},
    "CloisterReconcilerNotLeading": {"cloister_reconciler_leading{}": "0", "cloister_reconcile_lag_seconds{}": "0+60"},
    "CloisterReconcilerStalled": {"cloister_reconcile_lag_seconds{}": "0+60"},
    "CloisterReconcilerStepsFail": {
        'cloister_reconciler_step_failures_total{kind="OperationalError"}': "0+5",
    },
    "CloisterCoordinatorDown": {'cloister_build_info{component="coordinator"}': None},
    "CloisterCoordinatorErrors": {'cloister_coordinator_requests_total{path="/sync",status="503"}': "0+30"},
    "CloisterDatabaseUnreachable": {"cloister_database_up{}": "0"},
    "CloisterObjectStoreErrors": {'cloister_reconciler_step_failures_total{kind="ObjectStoreError"}': "0+2"},
    "CloisterBatchesAtRisk": {'cloister_batches_at_risk{model="m"}': "1"},
    "CloisterQueueStuck": {'cloister_job_slots_used{accelerator="a10g"}': "1"},
    "CloisterJobsFail": {'cloister_job_failures_in_a_row{model="m"}': "2"},
    "CloisterEnginesRestart": {'cloister_engine_restarts_total{model="m"}': "0+1"},
    "CloisterSegmentsFail": {"cloister_segment_failures{}": "2"},
    "CloisterLeaseOld": {"cloister_lease_age_seconds{}": "0+60"},
    "CloisterAuditLag": {"cloister_audit_lag_seconds{}": "0+60"},
    "CloisterRetentionLag": {"cloister_retention_lag_seconds{}": "0+60"},
    "CloisterWorkspaceFull": {'cloister_workspace_claimed_bytes{pod="api-1"}': "95"},
}
# Labels that an alert has besides its severity.
KEPT = {
    "CloisterApiDown": {"component": "api", "namespace": NAMESPACE},
    "CloisterCoordinatorDown": {"component": "coordinator", "namespace": NAMESPACE},
    "CloisterBatchesAtRisk": {"model": "m", "namespace": NAMESPACE},
    "CloisterQueueStuck": {"accelerator": "a10g", "namespace": NAMESPACE},
    "CloisterJobsFail": {"model": "m", "namespace": NAMESPACE},
    "CloisterEnginesRestart": {"model": "m", "namespace": NAMESPACE},
    "CloisterWorkspaceFull": {"pod": "api-1", "namespace": NAMESPACE},
}
AFTER_MINUTES = 120
RULES = CHECKOUT / "infra" / "monitoring" / "alerts.yaml"
PORTS = {
    "api": "CLOISTER_PORT",
    "reconciler": "CLOISTER_HEALTH_PORT",
    "coordinator": "CLOISTER_COORDINATOR_METRICS_PORT",
}
"""The setting with the port of metrics, by component."""


@pytest.fixture(scope="module")
def bin_directory(programs: Path) -> Path:
    build(programs, ["prometheus", "promtool"])
    return programs / "bin"


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rules of a stack."""
    path = tmp_path_factory.mktemp("rules") / "alerts.yaml"
    path.write_text(yaml.safe_dump(rule_groups(namespace=NAMESPACE)))
    return path


def unit_test(series: dict[str, str], *, firing: str = "") -> dict[str, Any]:
    """Return a test of promtool: with these series exactly this alert fires, or none."""

    def values(step: str) -> str:
        start, _, growth = step.partition("+")
        return f"{start}+{growth or 0}x{AFTER_MINUTES}"

    def selected(name: str) -> str:
        return name.replace("}", f'{"" if name.endswith("{}") else ","}namespace="{NAMESPACE}"}}')

    expected: dict[str, Any] = {}
    for alert in ALERTS:
        rule = alert.rule(namespace=NAMESPACE, runbook_url="docs/runbook.md")
        labels = rule["labels"] | KEPT.get(alert.name, {"namespace": NAMESPACE})
        fired = [{"exp_labels": labels, "exp_annotations": rule["annotations"]}] if alert.name == firing else []
        expected[alert.name] = {"eval_time": f"{AFTER_MINUTES}m", "alertname": alert.name, "exp_alerts": fired}
    return {
        "interval": "1m",
        "input_series": [{"series": selected(name), "values": values(step)} for name, step in series.items()],
        "alert_rule_test": list(expected.values()),
    }


def run_unit_test(bin_directory: Path, rules: Path, tmp_path: Path, test: dict[str, Any]) -> str:
    """Run promtool and return what it reports; nothing if the test passes."""
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run(
        [bin_directory / "promtool", "test", "rules", path], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.cluster
def test_promtool_accepts_the_rules(bin_directory: Path, rules: Path) -> None:
    command = [bin_directory / "promtool", "check", "rules", "--lint-fatal", rules, RULES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count(f"SUCCESS: {len(ALERTS)} rules found")) == (0, 2), done.stderr


@pytest.mark.cluster
def test_healthy_stack_fires_no_alert(bin_directory: Path, rules: Path, tmp_path: Path) -> None:
    assert run_unit_test(bin_directory, rules, tmp_path, unit_test(HEALTHY)) == ""


@pytest.mark.cluster
@pytest.mark.parametrize("alert", [alert.name for alert in ALERTS])
def test_fault_fires_exactly_its_alert(bin_directory: Path, rules: Path, tmp_path: Path, alert: str) -> None:
    series = {name: value for name, value in (HEALTHY | FAULTS[alert]).items() if value is not None}
    assert run_unit_test(bin_directory, rules, tmp_path, unit_test(series, firing=alert)) == ""
    assert "FAILED" in run_unit_test(bin_directory, rules, tmp_path, unit_test(HEALTHY, firing=alert))


@pytest.fixture
def environment(database_url: str, tmp_path: Path, receipt_key_file: str) -> dict[str, str]:
    """Settings of API, reconciler and coordinator, whose ports of metrics are in the order of ``PORTS``."""
    (tmp_path / "models.yaml").write_text("models:\n  - id: demo\n    source: /models/demo\n")
    coordinator_port, *ports = free_ports(4)
    return {
        **os.environ,
        "CLOISTER_DATABASE_URL": database_url,
        "CLOISTER_OBJECT_STORE": f"file://{tmp_path}/objects",
        "CLOISTER_MODELS": str(tmp_path / "models.yaml"),
        "CLOISTER_RECEIPT_KEY_FILE": receipt_key_file,
        "CLOISTER_WORKSPACE_GIB": "1",
        "CLOISTER_COORDINATOR_PORT": str(coordinator_port),
        **dict(zip(PORTS.values(), map(str, ports), strict=True)),
    }


@contextlib.contextmanager
def running(command: Sequence[Path | str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the context ends."""
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def prometheus(bin_directory: Path, directory: Path, ports: Mapping[str, str]) -> Iterator[httpx.Client]:
    """Run Prometheus with the rules file of the repository on the given ports, and yield a client of its API."""
    (port,) = free_ports(1)
    targets = [
        {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{each}"], "labels": {"namespace": NAMESPACE}}]}
        for name, each in ports.items()
    ]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": targets,
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [
        bin_directory / "prometheus",
        f"--config.file={directory}/prometheus.yaml",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (
        running(command, os.environ),
        httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", trust_env=False) as client,
    ):
        yield client


def read(client: httpx.Client, path: str) -> Any:
    """Return the data of an answer; an empty mapping while Prometheus starts."""
    with contextlib.suppress(httpx.TransportError):
        answer = client.get(path)
        return answer.json()["data"] if answer.status_code == 200 else {}
    return {}


def alerts(client: httpx.Client) -> set[str]:
    """Return the names of alerts that fire, or will soon."""
    return {alert["labels"]["alertname"] for alert in read(client, "/alerts").get("alerts", ())}


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; tests with real nodes may take the processors meanwhile."""
    end = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.cluster
def test_prometheus_scrapes_the_processes_and_evaluates_the_rules(
    bin_directory: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    ports = {name: environment[variable] for name, variable in PORTS.items()}
    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(running([sys.executable, "-m", f"service.{name}"], environment)) for name in PORTS
        }
        client = stack.enter_context(prometheus(bin_directory, tmp_path, ports))

        def evaluated() -> bool:
            targets = read(client, "/targets").get("activeTargets", ())
            rules = [rule for group in read(client, "/rules").get("groups", ()) for rule in group["rules"]]
            return (
                [target["health"] for target in targets] == ["up"] * len(PORTS)
                and [rule["health"] for rule in rules] == ["ok"] * len(ALERTS)
                and alerts(client) == set()
            )

        wait_until(evaluated)
        processes["reconciler"].kill()
        wait_until(lambda: alerts(client) == {"CloisterReconcilerNotLeading"})
