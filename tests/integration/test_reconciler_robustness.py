"""Batches end once and complete although backends fail now and then."""

import dataclasses
import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psycopg
import pytest

from ray_job.contract.job_spec import JobSpec, ModelSpec, ObjectStoreLocation
from ray_job.contract.object_keys import parts_prefix
from service.adapters.directory_object_store import DirectoryObjectStore
from service.backends import Slots
from service.coordinator import leasing
from service.db import Pool
from service.errors import LauncherError, ObjectStoreError
from service.model_catalogue import CatalogueModel
from service.ports import JobStatus, Launcher, ObjectStore, StoredObject
from tests.integration.reconciler_harness import SUCCEEDED, Stack, line, looping

pytestmark = pytest.mark.slow


class EveryThirdCallFails:
    """Raises in every third call, counted over all threads."""

    def __init__(self, error: type[Exception]) -> None:
        self.is_on = True
        self.failures = 0
        self._error = error
        self._calls = itertools.count(1)

    def __call__(self) -> None:
        if self.is_on and next(self._calls) % 3 == 0:
            self.failures += 1
            raise self._error("every third call fails")


class FlakyStore:
    """An object store whose every third call fails, sometimes after it took effect."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.fails = EveryThirdCallFails(ObjectStoreError)

    def put(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        stored = self._store.put(key, chunks)
        self.fails()
        return stored

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        self.fails()
        return self._store.read(key, start=start)

    def keys(self, prefix: str) -> Iterator[str]:
        self.fails()
        return self._store.keys(prefix)

    def delete(self, key: str) -> tuple[str, ...]:
        deleted = self._store.delete(key)
        self.fails()
        return deleted

    def location(self) -> ObjectStoreLocation:
        return self._store.location()

    def read_url(self, key: str, *, expires_s: int) -> str:
        return self._store.read_url(key, expires_s=expires_s)

    def write_url(self, key: str, *, expires_s: int) -> str:
        return self._store.write_url(key, expires_s=expires_s)

    def check(self) -> None:
        self._store.check()


class FlakyLauncher:
    """A launcher whose every third call fails; launches fail after they took effect."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.fails = EveryThirdCallFails(LauncherError)

    def refusal(self, model: ModelSpec) -> str:
        self.fails()
        return self._launcher.refusal(model)

    def launch(self, spec: JobSpec, token: str) -> None:
        self._launcher.launch(spec, token)
        self.fails()

    def status(self, job_id: str) -> JobStatus:
        self.fails()
        return self._launcher.status(job_id)

    def stop(self, job_id: str) -> None:
        self.fails()
        self._launcher.stop(job_id)


def create_many(stack: Stack, count: int) -> None:
    for number in range(count):
        stack.create(line(1), line(2), batch_id=f"b{number}", project=f"p{number % 3}")


def finish_all(stack: Stack, count: int, within_s: float) -> None:
    end = time.monotonic() + within_s
    while True:
        try:
            row = stack.sql("SELECT count(*) FROM batches WHERE parts_deleted_at IS NOT NULL")[0]
        except psycopg.OperationalError:
            row = {"count": 0}
        if row["count"] == count:
            return
        assert time.monotonic() < end, stack.sql("SELECT id, status, segments_left FROM batches")
        time.sleep(0.05)


def check_all_are_whole(stack: Stack, count: int) -> None:
    batches = stack.sql("SELECT * FROM batches")
    assert [(b["status"], b["completed"], b["failed"]) for b in batches] == [("completed", 1, 1)] * count
    for batch in batches:
        assert [row["custom_id"] for row in stack.file(batch["output_file_id"])] == ["id-1"]
        assert [row["custom_id"] for row in stack.file(batch["error_file_id"])] == ["id-2"]
        assert list(stack.store.keys(parts_prefix(batch["id"]))) == []
    ends = stack.sql("SELECT batch_id FROM batch_events WHERE type = 'batch.completed'")
    assert len(ends) == len({row["batch_id"] for row in ends}) == count
    assert len(stack.sql("SELECT id FROM files WHERE purpose = 'batch_output'")) == 2 * count
    assert stack.sql("SELECT sum(batches) FROM usage_totals")[0]["sum"] == count


@pytest.fixture
def working(pool: Pool, tmp_path: Path) -> Stack:
    """A stack whose jobs, one for each batch, commit two lines, one of them failed, and end."""
    stack = Stack(pool, DirectoryObjectStore(tmp_path / "objects"), tmp_path, slots=Slots(default=3))
    model = CatalogueModel(spec=ModelSpec(id="demo", source="x", sharing="batch"))
    stack.backends = dataclasses.replace(stack.backends, catalogue={"demo": model})

    def work(spec: JobSpec) -> JobStatus:
        job = stack.job(spec.job_id)
        for batch_id in {lease.batch_id for lease in job.lease().leases}:
            job.commit(1, batch_id=batch_id)
            job.commit(2, batch_id=batch_id, fails=True)
        assert job.end()
        return SUCCEEDED

    stack.work = work
    return stack


def test_batches_complete_although_every_third_call_to_store_and_launcher_fails(
    working: Stack, database_url: str
) -> None:
    store, launcher = FlakyStore(working.store), FlakyLauncher(working.launcher)
    backends = dataclasses.replace(working.backends, store=store, launcher=launcher, first_pause_s=0.02)
    create_many(working, 8)
    with looping(backends, database_url):
        finish_all(working, 8, within_s=60)
    assert min(store.fails.failures, launcher.fails.failures) > 5
    store.fails.is_on = False
    check_all_are_whole(working, 8)
    assert len(working.launcher.launched) == 8


def test_connection_detects_a_lost_server_within_25_seconds(pool: Pool) -> None:
    with pool.connection() as connection:
        parameters = connection.info.get_parameters()
    assert (
        int(parameters["keepalives_idle"])
        + int(parameters["keepalives_interval"]) * int(parameters["keepalives_count"])
        == 25
    )
    assert (parameters["tcp_user_timeout"], parameters["connect_timeout"]) == ("25000", "5")


def test_batches_complete_although_postgres_cuts_all_connections_repeatedly(
    working: Stack, database_url: str, postgres_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A job whose connection is cut after its lease was recorded never hears of it, and waits until it expires.
    monkeypatch.setattr(leasing, "LEASE_S", 0.1)
    over = threading.Event()

    def cut() -> None:
        with psycopg.connect(postgres_server_url, autocommit=True) as connection:
            for _ in range(3):
                over.wait(0.3)
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                    [psycopg.conninfo.conninfo_to_dict(database_url)["dbname"]],
                )

    create_many(working, 20)
    cutter = threading.Thread(target=cut)
    with looping(working.backends, database_url):
        cutter.start()
        finish_all(working, 20, within_s=60)
        cutter.join()
    check_all_are_whole(working, 20)
    assert working.sql("SELECT count(*), count(DISTINCT job_id) AS jobs FROM parts") == [{"count": 0, "jobs": 0}]
    assert working.sql("SELECT count(DISTINCT domain) AS domains FROM jobs") == [{"domains": 20}]
