"""The bundled database's start script, run by a shell on a real Postgres."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from infra import database
from service.db import migrate
from service.local.postgres import _account, _binary, as_account

SCRIPTS = Path(database.__file__).parent / "scripts"
OWNER, JOB = "cloister_acme_dev", "cloister_acme_dev_job"


pytestmark = pytest.mark.local_network


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with the volume, the sockets and the passwords; short, because a socket's path must be."""
    path, account = Path(tempfile.mkdtemp(prefix="postgres-start-")), _account()
    for name in ("volume", "sockets", "passwords"):
        (path / name).mkdir()
        if account is not None:
            os.chown(path / name, account.pw_uid, account.pw_gid)
    set_passwords(path, owner="for owner's eyes", job='a "job"')
    yield path
    shutil.rmtree(path, ignore_errors=True)


def set_passwords(directory: Path, **passwords: str) -> None:
    for role, password in passwords.items():
        (directory / "passwords" / role).write_text(password)


@contextmanager
def started(directory: Path) -> Iterator[int]:
    """The port of a server that the script has started, once it takes connections."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    environment = {
        "PATH": f"{Path(_binary('postgres')).parent}:/usr/bin:/bin",
        "PGPORT": str(port),
        "PGDATA": str(directory / "volume/data"),
        "SOCKETS": str(directory / "sockets"),
        "SCRIPTS": str(SCRIPTS),
        "PASSWORDS": str(directory / "passwords"),
        "DATABASE": OWNER,
        "OWNER": OWNER,
        "JOB": JOB,
    }
    options = ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-c", "shared_buffers=16MB"]
    command = ["/bin/sh", str(SCRIPTS / "postgres_start.sh"), *options]
    with subprocess.Popen(as_account(command, _account()), env=environment, stderr=subprocess.DEVNULL) as server:
        try:
            yield _wait(server, port)
        finally:
            server.send_signal(2)


def _wait(server: subprocess.Popen[bytes], port: int) -> int:
    deadline = time.monotonic() + 60
    while server.poll() is None and time.monotonic() < deadline:
        try:
            connect(port, OWNER, "no role has this password").close()
        except psycopg.OperationalError as error:
            # A server listens before it takes connections.
            if "password authentication failed" in str(error):
                return port
            time.sleep(0.05)
    pytest.fail(f"the start script ended with {server.poll()} and no server answers")


def connect(port: int, role: str, password: str) -> psycopg.Connection:
    return psycopg.connect(host="127.0.0.1", port=port, dbname=OWNER, user=role, password=password, autocommit=True)


def test_the_owner_can_migrate_and_the_job_role_can_do_nothing_but_connect(directory: Path) -> None:
    with started(directory) as port:
        migrate(f"postgresql://{OWNER}@127.0.0.1:{port}/{OWNER}", password="for owner's eyes")

        with connect(port, JOB, 'a "job"') as connection:
            for forbidden in ("CREATE TABLE a ()", "CREATE TEMP TABLE a ()", "SELECT * FROM batches"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(forbidden)


def test_a_changed_password_takes_effect_at_the_next_start_and_the_data_stays(directory: Path) -> None:
    with started(directory) as port, connect(port, OWNER, "for owner's eyes") as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS number")
    set_passwords(directory, owner="another")

    with started(directory) as port:
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            connect(port, OWNER, "for owner's eyes")
        with connect(port, OWNER, "another") as connection:
            assert connection.execute("SELECT number FROM kept").fetchone() == (1,)


def test_a_first_start_that_was_cut_off_is_begun_again(directory: Path) -> None:
    (directory / "volume/data.new").mkdir()
    (directory / "volume/data.new/PG_VERSION").write_text("18\n")

    with started(directory) as port, connect(port, OWNER, "for owner's eyes") as connection:
        assert connection.execute("SELECT current_user").fetchone() == (OWNER,)
