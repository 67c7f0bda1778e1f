"""The reconciler's HTTP endpoints, through real requests."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psycopg
import pytest

from ray_job.contract.job_spec import JobSpec
from service.adapters.directory_object_store import DirectoryObjectStore
from service.db import Pool
from service.errors import ObjectStoreError
from service.local.ray_head import free_ports
from service.ports import JobStatus
from service.reconciler.health import serve_health
from tests.integration.reconciler_harness import Stack, eventually, line, looping


@pytest.fixture
def health(stack: Stack) -> Iterator[httpx.Client]:
    with (
        serve_health(stack.backends, host="127.0.0.1", port=0) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        yield client


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_all_addresses_include_ipv4_and_ipv6(stack: Stack, host: str) -> None:
    with serve_health(stack.backends, host="::", port=0) as port:
        assert httpx.get(f"http://{host}:{port}/healthz", trust_env=False).status_code == 200


def test_healthz_fails_if_the_loop_has_not_run_for_half_a_minute(stack: Stack, health: httpx.Client) -> None:
    assert health.get("/healthz").status_code == 200
    stack.backends.metrics.beat_at = time.monotonic() - 31
    silent = health.get("/healthz")
    assert (silent.status_code, silent.json()["missing"]) == (503, ["the loop has not run for 31 s"])


def test_leader_and_standby_are_both_ready(stack: Stack, health: httpx.Client, database_url: str) -> None:
    assert health.get("/readyz").json() == {"status": "ok", "role": "standby"}
    with psycopg.connect(database_url, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(7203002)")
        with looping(stack.backends, database_url):
            stack.backends.metrics.beat_at = 0
            eventually(lambda: health.get("/healthz").json() == {"status": "ok", "role": "standby"})
            other.execute("SELECT pg_advisory_unlock(7203002)")
            eventually(lambda: health.get("/readyz").json() == {"status": "ok", "role": "leading"})
            beats = stack.sql("SELECT now() - beat_at AS since FROM reconciler_heartbeat")
            assert beats[0]["since"].total_seconds() < 5
    assert health.get("/readyz").json()["role"] == "standby"


class Unreachable(DirectoryObjectStore):
    def check(self) -> None:
        raise ObjectStoreError("no")


def test_readyz_names_the_unavailable_backends(pool: Pool, database_url: str, tmp_path: Path) -> None:
    stack = Stack(pool, Unreachable(tmp_path / "objects"), tmp_path)
    with psycopg.connect(database_url) as owner:
        owner.execute("DROP TABLE batches CASCADE")
    with serve_health(stack.backends, host="127.0.0.1", port=0) as port:
        answer = httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False)
    assert (answer.status_code, answer.json()["missing"]) == (503, ["database", "object store"])


def test_metrics_count_launches_failures_and_removals(stack: Stack, health: httpx.Client, database_url: str) -> None:
    def work(spec: JobSpec) -> JobStatus:
        if stack.sql("SELECT FROM jobs WHERE domain = 'bad' AND id = %s", spec.job_id):
            raise RuntimeError("a defect")
        return stack.job(spec.job_id).serve()

    stack.work = work
    stack.create(line(1), batch_id="good")
    stack.create(line(1), batch_id="bad", project="bad")
    with looping(stack.backends, database_url):
        eventually(lambda: stack.batch("good")["status"] == "completed")
        eventually(lambda: "cloister_reconciler_step_failures_total{" in health.get("/metrics").text)
        text = health.get("/metrics").text
    assert 'cloister_reconciler_step_failures_total{kind="RuntimeError"}' in text
    assert "cloister_job_launches_total 1.0" in text
    assert "cloister_reconciler_leading 1.0" in text
    assert "cloister_reconciler_pass_duration_seconds_count" in text
    assert 'cloister_project_lines_total{model="demo",outcome="completed",project_id="p"} 1.0' in text
    assert 'cloister_build_info{component="reconciler"' in text


def test_other_paths_are_not_found(health: httpx.Client) -> None:
    assert health.get("/").status_code == 404
    assert health.post("/healthz").status_code == 501


@pytest.fixture
def environment(database_url: str, tmp_path: Path, receipt_key_file: str) -> dict[str, str]:
    (tmp_path / "models.yaml").write_text("models:\n  - id: demo\n    source: /models/demo\n")
    (port,) = free_ports(1)
    return {
        **os.environ,
        "CLOISTER_DATABASE_URL": database_url,
        "CLOISTER_OBJECT_STORE": f"file://{tmp_path}/objects",
        "CLOISTER_MODELS": str(tmp_path / "models.yaml"),
        "CLOISTER_HEALTH_PORT": str(port),
        "CLOISTER_RECEIPT_KEY_FILE": receipt_key_file,
    }


def test_process_serves_its_port_and_ends_on_sigterm(environment: dict[str, str]) -> None:
    url = f"http://127.0.0.1:{environment['CLOISTER_HEALTH_PORT']}/readyz"

    def leads() -> bool:
        with contextlib.suppress(httpx.ConnectError):
            return bool(httpx.get(url, trust_env=False).json() == {"status": "ok", "role": "leading"})
        return False

    with subprocess.Popen(
        [sys.executable, "-m", "service.reconciler"], env=environment, stdout=subprocess.DEVNULL
    ) as process:
        try:
            eventually(leads)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=15) == 0


def test_port_in_use_ends_the_process_with_the_name_of_the_setting(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", int(environment["CLOISTER_HEALTH_PORT"]))):
        ended = subprocess.run(
            [sys.executable, "-m", "service.reconciler"], env=environment, capture_output=True, text=True, check=False
        )
    assert ended.returncode == 2
    assert "CLOISTER_HEALTH_PORT: cannot listen on 127.0.0.1:" in ended.stderr
