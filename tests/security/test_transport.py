"""Attacks on connections: servers with a certificate that the stack does not trust."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from structlog.testing import capture_logs

from ray_job.contract.job_spec import ObjectStoreLocation
from service.adapters.otlp_spans import OtlpSpans
from service.adapters.s3_object_store import S3ObjectStore
from service.backends import spans_dropped
from service.errors import ObjectStoreError
from service.traces import Traces
from tests.infra.previewed_stacks import preview_values, stack_text
from tests.integration.reconciler_harness import Stack, eventually
from tests.integration.test_webhook_deliveries import cancel_one, deliveries, delivering, subscribe
from tests.security.tls_servers import CONTENT, Authority, https_server, make_authority, postgres_with_tls

# What a job transfers: plans and parts by signed URLs, lines to an endpoint, and weights.
TRANSFERS = """
import asyncio, json, sys
import aiohttp
from ray_job import object_urls
from ray_job.contract.job_spec import ObjectStoreLocation
from ray_job.engines import http
from ray_job.weights import open_file_system

object_urls.RETRY_FOR_S = 0
http.ATTEMPTS = 1
url, results = sys.argv[1], {}

async def transfer():
    async with aiohttp.ClientSession() as session, http.EndpointSession(f"{url}/v1", 10) as endpoint:
        steps = {
            "read": object_urls.read_range(session, f"{url}/plan", 0, 7),
            "write": object_urls.put_object(session, f"{url}/part", b"x"),
            "endpoint": endpoint.post("", headers={}, data=json.dumps({"path": "/v1/x", "body": "{}"})),
        }
        for name, step in steps.items():
            try:
                await step
                results[name] = "ok"
            except Exception as error:
                results[name] = str(error)

asyncio.run(transfer())
try:
    location = ObjectStoreLocation(kind="s3", bucket="b", prefix="", endpoint_url=url, region="us-east-1")
    file_system, base = open_file_system(location)
    with file_system.open_input_stream(f"{base}/weights") as stream:
        results["weights"] = "ok" if stream.read() == b"content" else "other content"
except OSError as error:
    results["weights"] = str(error)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(scope="module")
def port(authority: Authority) -> Iterator[int]:
    with https_server(authority) as opened:
        yield opened


@pytest.fixture(scope="module")
def service_bundle(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the init container of the service's pods writes, written by its own command."""
    text = stack_text()
    values = {**text.values, "trust": {"ca_bundle": authority.ca_file.read_text()}}
    [api] = [each for each in preview_values(values, text.secret_keys).of_type("Deployment") if each.name == "api"]
    [init] = api.inputs["spec"]["template"]["spec"]["initContainers"]
    root = tmp_path_factory.mktemp("pod")
    for path, content in {
        "etc/cloister/secrets/database-credentials/pgpass": "secret",
        "etc/cloister/ca-bundle/ca.crt": authority.ca_file.read_text(),
    }.items():
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text(content)
    (root / "run/cloister/credentials").mkdir(parents=True)
    command = init["command"][-1].replace("/etc/cloister", f"{root}/etc/cloister")
    command = command.replace("/run/cloister", f"{root}/run/cloister")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run([*init["command"][:-1], command], check=True, env={"PATH": path})
    [variables] = [container["env"] for container in api.inputs["spec"]["template"]["spec"]["containers"]]
    files = {each["value"] for each in variables if each["name"] in {"SSL_CERT_FILE", "AWS_CA_BUNDLE"}}
    [file] = files
    return Path(f"{root}{file}")


def s3(monkeypatch: pytest.MonkeyPatch, port: int) -> S3ObjectStore:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    url = f"https://127.0.0.1:{port}"
    return S3ObjectStore(ObjectStoreLocation(kind="s3", bucket="b", prefix="", endpoint_url=url, region="us-east-1"))


def test_service_reads_an_object_store_of_a_private_authority(
    monkeypatch: pytest.MonkeyPatch, port: int, service_bundle: Path
) -> None:
    with pytest.raises(ObjectStoreError, match="SSLError"):
        list(s3(monkeypatch, port).read("key"))
    monkeypatch.setenv("AWS_CA_BUNDLE", str(service_bundle))
    assert b"".join(s3(monkeypatch, port).read("key")) == CONTENT


def test_bundle_of_the_service_keeps_the_public_authorities(service_bundle: Path, authority: Authority) -> None:
    bundle = service_bundle.read_text()
    assert bundle.endswith(authority.ca_file.read_text())
    assert bundle.count("BEGIN CERTIFICATE") > 100


@pytest.mark.parametrize("trusted", [False, True])
def test_webhook_is_sent_to_receivers_of_trusted_authorities_only(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, port: int, service_bundle: Path, trusted: bool
) -> None:
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(service_bundle))
    subscribe(stack, f"https://localhost:{port}/hook")
    cancel_one(stack)
    with delivering(stack):
        eventually(lambda: deliveries(stack)[0]["delivered_at"] or deliveries(stack)[0]["last_error"])
    assert (deliveries(stack)[0]["delivered_at"] is not None) == trusted
    assert trusted or "certificate verify failed" in deliveries(stack)[0]["last_error"]


@pytest.mark.parametrize("trusted", [False, True])
def test_traces_go_to_a_collector_of_a_trusted_authority_only(
    monkeypatch: pytest.MonkeyPatch, port: int, service_bundle: Path, trusted: bool
) -> None:
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(service_bundle))
    dropped = spans_dropped()
    with (
        capture_logs() as logs,
        OtlpSpans(f"https://localhost:{port}", process="api", dropped=dropped, timeout_s=1.5) as exporter,
    ):
        Traces(exporter).root("batch_1", "batch", datetime.now(UTC), {})
    assert dropped._value.get() == (not trusted)
    assert trusted or "certificate verify failed" in logs[0]["reason"]


def transfers(port: int, **environment: str) -> dict[str, str]:
    variables = {**os.environ, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", **environment}
    command = [sys.executable, "-c", TRANSFERS, f"https://127.0.0.1:{port}"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_job_transfers_nothing_to_a_server_that_it_does_not_trust(port: int) -> None:
    failures = transfers(port)
    assert set(failures) == {"read", "write", "endpoint", "weights"}
    for name in ("read", "write", "endpoint"):
        assert "ClientConnectorCertificateError" in failures[name]
    assert "SSL" in failures["weights"]


def test_job_trusts_the_private_authority_of_its_stack(port: int, authority: Authority) -> None:
    found = transfers(port, SSL_CERT_FILE=str(authority.ca_file))
    assert found == dict.fromkeys(("read", "write", "endpoint", "weights"), "ok")


def test_server_with_another_certificate_does_not_get_the_login_of_the_database(
    database_url: str, authority: Authority, tmp_path: Path
) -> None:
    parts = conninfo_to_dict(database_url)
    impostor = make_authority(tmp_path / "impostor")
    unix_socket = f"{parts['host']}/.s.PGSQL.{parts.get('port') or 5432}"

    def connect(to: Authority, **tls: str) -> None:
        with postgres_with_tls(to, unix_socket) as opened:
            address: dict[str, Any] = {"host": "localhost", "port": opened}
            with psycopg.connect(**address, dbname=parts["dbname"], user=parts["user"], **tls) as connection:
                connection.execute("SELECT 1")

    connect(impostor, sslmode="require")
    connect(authority, sslmode="verify-full", sslrootcert=str(authority.ca_file))
    with pytest.raises(psycopg.OperationalError, match="certificate verify failed"):
        connect(impostor, sslmode="verify-full", sslrootcert=str(authority.ca_file))
