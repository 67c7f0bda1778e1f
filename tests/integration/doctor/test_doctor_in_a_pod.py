"""What `cloister doctor` finds where a stack's settings are: settings, object store, names and ways."""

import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from service.adapters.directory_object_store import DirectoryObjectStore
from service.adapters.memory_object_store import MemoryObjectStore
from service.adapters.s3_object_store import S3ObjectStore, open_s3_client
from service.cli.doctor.network import Way, way_to
from service.cli.doctor.object_store import SIZE_BYTES, try_object
from service.errors import ObjectStoreError
from service.ports import StoredObject
from service.settings import parse_object_store_url
from tests.integration.doctor.told import Doctor


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-to-be-told")
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.mark.usefixtures("settings")
def test_a_stack_that_is_right_has_no_failure(doctor: Doctor, tmp_path: Path) -> None:
    told = doctor()
    assert told.code == 0, told.out
    assert told.results == {
        "cluster": "not_checked",
        "database": "ok",
        "migrations": "ok",
        "database role of jobs": "ok",
        "object store": "ok",
        "models": "ok",
        "launcher": "not_checked",
        "network policies": "not_checked",
        "API": "not_checked",
    }
    assert "PostgreSQL" in told["database"]
    assert list(DirectoryObjectStore(tmp_path / "objects").keys("")) == []
    assert told.counts == {"done": True, "ok": 5, "failed": 0, "not_checked": 4}


def test_nothing_to_look_at_is_no_success(doctor: Doctor) -> None:
    told = doctor()
    assert told.code == 1
    assert set(told.results.values()) == {"not_checked"}


def test_settings_that_are_wrong_are_all_told(doctor: Doctor, settings: Callable[..., None]) -> None:
    settings(DATABASE_URL="", MAX_RUNNING_JOBS="many")
    told = doctor()
    assert told.code == 1
    assert "CLOISTER_DATABASE_URL is not set" in told["settings"]
    assert "CLOISTER_MAX_RUNNING_JOBS" in told["settings"]


def test_an_s3_store_is_tried_in_parts_and_left_empty(doctor: Doctor, settings: Callable[..., None], s3: str) -> None:
    location = parse_object_store_url(f"s3://bucket/a/b?endpoint_url={s3}&region=us-east-1")
    client = open_s3_client(location)
    client.create_bucket(Bucket="bucket")
    settings(OBJECT_STORE=f"s3://bucket/a/b?endpoint_url={s3}&region=us-east-1")
    assert doctor()["object store"] == (
        f"ok: s3://bucket/a/b at {s3}: an object of {SIZE_BYTES >> 20} MiB written, listed, read and deleted"
    )
    assert list(S3ObjectStore(location, client).keys("")) == []
    client.close()


def test_a_bucket_that_is_missing_is_told(doctor: Doctor, settings: Callable[..., None], s3: str) -> None:
    settings(OBJECT_STORE=f"s3://nowhere/a?endpoint_url={s3}&region=us-east-1")
    told = doctor()
    assert told["object store"].startswith(f"failed: CLOISTER_OBJECT_STORE, s3://nowhere/a at {s3}: ")
    assert "there is no such bucket" in told["object store"]
    assert "not-to-be-told" not in told.out


@pytest.mark.usefixtures("s3")
def test_a_store_that_does_not_answer_is_told(doctor: Doctor, settings: Callable[..., None]) -> None:
    settings(OBJECT_STORE="s3://bucket/a?endpoint_url=http://127.0.0.1:9&region=us-east-1")
    assert "a network policy lets this pod reach it" in doctor()["object store"]


def test_an_address_that_is_none_is_told(doctor: Doctor, settings: Callable[..., None]) -> None:
    settings(OBJECT_STORE="s3://bucket/a?endpoint_url=http://&region=us-east-1")
    told = doctor()
    assert told["object store"].endswith("Invalid endpoint: http://")
    assert told.results["models"] == "ok"


class LossyStore(MemoryObjectStore):
    """Loses the answer to every object that it takes."""

    def put(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        super().put(key, chunks)
        raise ObjectStoreError("no answer")


def test_an_object_is_deleted_though_the_answer_to_it_was_lost() -> None:
    store = LossyStore()
    with pytest.raises(ObjectStoreError, match="no answer"):
        try_object(store, "doctor/1")
    assert list(store.keys("")) == []


@pytest.mark.parametrize("host", ["database.invalid", "database..acme"])
def test_a_name_that_leads_nowhere_is_told(doctor: Doctor, settings: Callable[..., None], host: str) -> None:
    settings(DATABASE_URL=f"postgresql://cloister@{host}/cloister?connect_timeout=2")
    told = doctor()
    assert told["DNS"].startswith(f"failed: {host} (CLOISTER_DATABASE_URL): ")
    assert told.results["object store"] == "ok"


def test_ways_are_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert way_to("127.0.0.1", port) == Way.OPEN
    assert way_to("127.0.0.1", port) == Way.REFUSED
    assert way_to("api.invalid", port) == Way.NO_NAME
    assert way_to("api..invalid", port) == Way.NO_NAME


def test_a_service_that_no_policy_shuts_is_told(
    doctor: Doctor, settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(LOG_LEVEL="info")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.getsockname()[1]))
        assert "network policies are not enforced" in doctor()["network policies"]
