"""Recovery of the database to a point in time, from a base backup and the write-ahead log, on an unchanged store."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event

import openai
import psycopg
import pytest
from fastapi.testclient import TestClient

from service.adapters.directory_object_store import DirectoryObjectStore
from service.api.app import create_app
from service.api.wrong_keys import WrongKeys
from service.api_keys import create_api_key
from service.audit.chain import seal_entries
from service.backends import Backends
from service.db import open_pool
from service.local import postgres
from service.local.keys import make_keys
from service.local.layout import Layout, layout_of, make_directories
from service.projects import create_project
from service.reconciler.orphans import search
from tests.integration.reconciler_harness import KEYS, Stack, line

pytestmark = pytest.mark.slow


class Server:
    """A Postgres that archives its write-ahead log.

    Args:
        directory: directory of data, backup and archive.
    """

    def __init__(self, directory: Path) -> None:
        self.layout: Layout = layout_of(directory / "data")
        make_directories(self.layout)
        make_keys(self.layout)
        self.archive, self.backup = directory / "archive", directory / "backup"
        account = postgres.postgres_account()
        for each in (self.archive, self.backup):
            each.mkdir(mode=0o700)
            if account is not None:
                os.chown(each, account.pw_uid, account.pw_gid)
        self._account = account

    @contextmanager
    def running(self, **settings: str) -> Iterator[None]:
        """Run Postgres with additional settings inside the context, and wait until it accepts writes."""
        archiving = {"archive_mode": "on", "archive_command": f"cp %p {self.archive}/%f", "fsync": "off"}
        options = [part for name, value in (archiving | settings).items() for part in ("-c", f"{name}={value}")]
        command = [*postgres.prepare(self.layout, os.environ), *options]
        with (self.layout.data_dir / "log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            self._wait(process)
            yield
        finally:
            process.terminate()
            process.wait(timeout=60)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and process.poll() is None:
            with suppress(psycopg.OperationalError), self.superuser() as connection:
                if connection.execute("SELECT pg_is_in_recovery()").fetchone() == (False,):
                    return
            time.sleep(0.05)
        raise AssertionError((self.layout.data_dir / "log").read_text())

    def superuser(self) -> psycopg.Connection[tuple[object, ...]]:
        url = self.layout.database_url(postgres.SUPERUSER, "postgres")
        return psycopg.connect(url, autocommit=True)

    def back_up(self) -> None:
        """Write a base backup."""
        command = [postgres.postgres_binary("pg_basebackup"), f"--pgdata={self.backup}", "--checkpoint=fast"]
        command += [f"--host={self.layout.postgres_socket_dir}", f"--username={postgres.SUPERUSER}"]
        subprocess.run(postgres.as_account(command, self._account), check=True)

    def lose(self) -> None:
        """Delete the data, and put the base backup in its place."""
        shutil.rmtree(self.layout.postgres_data)
        shutil.move(self.backup, self.layout.postgres_data)
        (self.layout.postgres_data / "recovery.signal").touch()

    @contextmanager
    def stack(self, directory: Path) -> Iterator[Stack]:
        """A reconciler on this database and the object store, which outlives it."""
        with open_pool(self.layout.database_url(postgres.SERVICE), max_size=2) as pool:
            yield Stack(pool, DirectoryObjectStore(directory / "objects"), directory)


@contextmanager
def api_of(stack: Stack) -> Iterator[openai.OpenAI]:
    """The official client of an API on the database and the object store of a stack, with a key that outlives both."""
    models = {"demo": stack.backends.catalogue["demo"]}
    backends = Backends(
        pool=stack.pool,
        store=stack.store,
        catalogue=models,
        catalogue_changed_at=datetime.now(UTC),
        encryption_keys=KEYS,
    )
    app = create_app(backends, wrong_keys=WrongKeys(stack.pool, limit=100))
    with TestClient(app) as http:
        yield openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="set later", max_retries=0, http_client=http)


def submit(client: openai.OpenAI, *lines: bytes) -> str:
    file = client.files.create(file=("in.jsonl", b"\n".join(lines)), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    return made.id


def age_everything(store: DirectoryObjectStore) -> None:
    then = time.time() - 48 * 3_600
    for key in store.keys(""):
        os.utime(Path(store.location().root) / key, (then, then))


def test_batches_and_files_of_the_moment_are_back_and_later_objects_are_kept(tmp_path: Path) -> None:
    server = Server(tmp_path)
    with server.running():
        postgres.set_up(server.layout)
        server.back_up()
        with server.stack(tmp_path) as stack, api_of(stack) as client:
            client.api_key = create_api_key(stack.pool, project_id=create_project(stack.pool, "p").id, name="first")
            done = submit(client, line(1))
            stack.advance(done)
            stack.job().answer_all()
            while stack.advance(done)["status"] != "completed":
                pass
            output = str(client.batches.retrieve(done).output_file_id)
            expected = client.files.content(output).content
            unfinished = submit(client, line(1), line(2))
            stack.advance(unfinished)
            job = stack.job()
            job.lease()
            job.commit(1, batch_id=unfinished)
            [moment] = stack.sql("SELECT now() AS at")
            late = client.files.create(file=("late.jsonl", line(3)), purpose="batch")
            job.commit(2, batch_id=unfinished)
            seal_entries(stack.pool)
            stack.sql("UPDATE orphan_search SET due_at = now()")
            search(stack.backends, Event())
        with server.superuser() as connection:
            connection.execute("SELECT pg_switch_wal()")
    before = set(stack.store.keys(""))
    server.lose()
    with (
        server.running(restore_command=f"cp {server.archive}/%f %p", **until(moment["at"])),
        server.stack(tmp_path) as stack,
        api_of(stack) as after,
    ):
        after.api_key = client.api_key
        assert after.files.content(output).content == expected
        with pytest.raises(openai.NotFoundError):
            after.files.retrieve(late.id)
        age_everything(stack.store)
        stack.sql("UPDATE orphan_search SET due_at = now()")
        search(stack.backends, Event())
        assert set(stack.store.keys("")) == before
        finish(stack, unfinished)
        assert after.batches.retrieve(unfinished).request_counts.completed == 2


def until(moment: datetime) -> dict[str, str]:
    return {"recovery_target_time": moment.isoformat(), "recovery_target_action": "promote"}


def finish(stack: Stack, batch_id: str) -> None:
    """Let jobs of a reconciler that has just started answer what is left of a batch."""
    end = time.monotonic() + 30
    while stack.advance(batch_id)["status"] != "completed":
        assert time.monotonic() < end, stack.batch(batch_id)
        stack.forget_backoff()
        if stack.launcher.launched:
            stack.job().answer_all()
