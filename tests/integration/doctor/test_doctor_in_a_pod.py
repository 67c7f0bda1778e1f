"""Findings inside a pod: settings, object store, names and network policies."""

import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from service.adapters.directory_object_store import DirectoryObjectStore
from service.adapters.memory_object_store import MemoryObjectStore
from service.doctor.backends import SIZE_BYTES, try_object
from service.doctor.findings import Result
from service.doctor.pod import check_blocked, check_enforcement
from service.errors import ObjectStoreError
from service.ports import StoredObject
from tests.integration.doctor.doctor_run import Doctor


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-value")
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.mark.usefixtures("settings")
def test_correct_stack_has_no_failures(doctor: Doctor, tmp_path: Path) -> None:
    run = doctor()
    assert run.code == 0, run.out
    assert run.results == {
        "cluster": "not_checked",
        "database": "ok",
        "migrations": "ok",
        "database role": "ok",
        "object store": "ok",
        "models": "ok",
        "launcher": "not_checked",
        "network policies": "not_checked",
        "API": "not_checked",
    }
    assert "PostgreSQL" in run["database"]
    assert list(DirectoryObjectStore(tmp_path / "objects").keys("")) == []
    assert run.counts == {"done": True, "ok": 5, "warning": 0, "failed": 0, "not_checked": 4}


def test_run_without_any_check_fails(doctor: Doctor) -> None:
    run = doctor()
    assert run.code == 1
    assert set(run.results.values()) == {"not_checked"}


def test_all_invalid_settings_are_reported(doctor: Doctor, settings: Callable[..., None]) -> None:
    settings(DATABASE_URL="", MAX_RUNNING_JOBS="many")
    run = doctor()
    assert run.code == 1
    assert "CLOISTER_DATABASE_URL is not set" in run["settings"]
    assert "CLOISTER_MAX_RUNNING_JOBS" in run["settings"]


def test_s3_check_uses_a_multipart_upload_and_leaves_no_object(
    doctor: Doctor, settings: Callable[..., None], s3: str
) -> None:
    client = boto3.client("s3", endpoint_url=s3, region_name="us-east-1")
    client.create_bucket(Bucket="bucket")
    settings(OBJECT_STORE=f"s3://bucket/a/b?endpoint_url={s3}&region=us-east-1")
    assert doctor()["object store"] == (
        f"ok: s3://bucket/a/b at {s3}: an object of {SIZE_BYTES >> 20} MiB was written, listed, read and deleted"
    )
    assert client.list_objects_v2(Bucket="bucket")["KeyCount"] == 0
    client.close()


def test_missing_bucket_is_reported(doctor: Doctor, settings: Callable[..., None], s3: str) -> None:
    settings(OBJECT_STORE=f"s3://nowhere/a?endpoint_url={s3}&region=us-east-1")
    run = doctor()
    assert run["object store"].startswith(f"failed: CLOISTER_OBJECT_STORE, s3://nowhere/a at {s3}: ")
    assert "the bucket does not exist" in run["object store"]
    assert "secret-value" not in run.out


@pytest.mark.usefixtures("s3")
def test_unreachable_store_is_reported(doctor: Doctor, settings: Callable[..., None]) -> None:
    settings(OBJECT_STORE="s3://bucket/a?endpoint_url=http://127.0.0.1:9&region=us-east-1")
    assert "a network policy allows this pod to reach it" in doctor()["object store"]


def test_invalid_endpoint_is_reported(doctor: Doctor, settings: Callable[..., None]) -> None:
    settings(OBJECT_STORE="s3://bucket/a?endpoint_url=http://&region=us-east-1")
    run = doctor()
    assert run["object store"].endswith("Invalid endpoint: http://")
    assert run.results["models"] == "ok"


class LossyStore(MemoryObjectStore):
    """A store that stores every object and then fails to answer."""

    def put(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        super().put(key, chunks)
        raise ObjectStoreError("no answer")


def test_object_is_deleted_even_if_the_answer_was_lost() -> None:
    store = LossyStore()
    with pytest.raises(ObjectStoreError, match="no answer"):
        try_object(store, "doctor/1")
    assert list(store.keys("")) == []


@pytest.mark.parametrize("host", ["database.invalid", "database..acme"])
def test_name_without_an_address_is_a_failure(doctor: Doctor, settings: Callable[..., None], host: str) -> None:
    settings(DATABASE_URL=f"postgresql://cloister@{host}/cloister?connect_timeout=2")
    run = doctor()
    assert run["DNS"].startswith(f"failed: {host} (CLOISTER_DATABASE_URL): ")
    assert run.results["object store"] == "ok"


@pytest.fixture
def port() -> Iterator[int]:
    """Port that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Port that does not answer, because nobody accepts the connections that fill its queue."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        with socket.create_connection(address):
            yield address[1]


def test_only_an_open_connection_shows_that_policies_are_not_enforced(port: int, silent_port: int) -> None:
    opened = check_blocked("the Kubernetes API", "127.0.0.1", port, if_open="the own node")
    assert opened.result == Result.FAILED
    assert f"reaches the Kubernetes API at 127.0.0.1:{port}, which they block (or the own node)" in opened.message
    silent = check_blocked("the Service api", "127.0.0.1", silent_port, if_closed="no pod is ready", timeout_s=0.2)
    assert silent.result == Result.OK
    assert silent.message.endswith("is unreachable, as the policies demand (or no pod is ready)")


def test_refused_connection_shows_enforced_policies_only_if_something_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert check_blocked("the Kubernetes API", "127.0.0.1", port).result == Result.OK
    found = check_blocked("the Service api", "127.0.0.1", port, if_closed="no pod is ready")
    assert found.result == Result.NOT_CHECKED
    assert "refuses at once: because of a policy, or no pod is ready" in found.message


@pytest.mark.parametrize("host", ["api.invalid", "api..invalid"])
def test_policy_on_a_name_without_an_address_is_not_checked(host: str) -> None:
    found = check_blocked("the Service api", host, 80)
    assert (found.result, found.message) == (
        Result.NOT_CHECKED, f"the name {host} has no address: see the findings on DNS"
    )  # fmt: skip


def test_api_must_not_reach_kubernetes_and_the_reconciler_not_the_api(port: int) -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}
    kubernetes, metadata = check_enforcement(pod)
    assert f"reaches the Kubernetes API at 127.0.0.1:{port}" in kubernetes.message
    assert "the cloud's metadata service at 169.254.169.254:80" in metadata.message
    api, metadata = check_enforcement(pod | {"CLOISTER_LAUNCHER": "kuberay"})
    assert api.message == "the name api has no address: see the findings on DNS"
    assert "the cloud's metadata service at 169.254.169.254:80" in metadata.message


def test_open_connection_shows_that_policies_are_not_enforced(
    doctor: Doctor, settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(LOG_LEVEL="info")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.getsockname()[1]))
        assert "network policies are not enforced" in doctor()["network policies"]
