"""Start script of the bundled database, run with a real Postgres."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from infra.data import database
from service.db.__main__ import run
from service.local.postgres import as_account, postgres_account, postgres_binary
from service.local.ray_head import free_ports

SCRIPTS = Path(database.__file__).parent / "scripts"
OWNER = "cloister_acme_dev"
SERVICE = "cloister_acme_dev_service"


pytestmark = [pytest.mark.local_network, pytest.mark.slow]


@pytest.fixture
def directory() -> Iterator[Path]:
    """Directory with the volume, sockets and passwords; its path is short, as a socket's path must be."""
    path, account = Path(tempfile.mkdtemp(prefix="postgres-start-")), postgres_account()
    for name in ("volume", "sockets", "passwords"):
        (path / name).mkdir()
        if account is not None:
            os.chown(path / name, account.pw_uid, account.pw_gid)
    set_password(path, "for owner's eyes")
    (path / "passwords/service").write_text("for service")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def set_password(directory: Path, password: str) -> None:
    (directory / "passwords" / "owner").write_text(password)


@contextmanager
def started(directory: Path) -> Iterator[int]:
    """Start the server with the script and yield its port when it accepts connections."""
    (port,) = free_ports(1)
    environment = {
        "PATH": f"{Path(postgres_binary('postgres')).parent}:/usr/bin:/bin",
        "PGPORT": str(port),
        "PGDATA": str(directory / "volume/data"),
        "SOCKETS": str(directory / "sockets"),
        "SCRIPTS": str(SCRIPTS),
        "PASSWORDS": str(directory / "passwords"),
        "DATABASE": OWNER,
        "OWNER": OWNER,
        "SERVICE": SERVICE,
    }
    options = ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-c", "shared_buffers=16MB"]
    command = ["/bin/sh", str(SCRIPTS / "postgres_start.sh"), *options]
    with subprocess.Popen(
        as_account(command, postgres_account()), env=environment, stderr=subprocess.DEVNULL
    ) as server:
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
            # A server listens before it accepts connections.
            if "password authentication failed" in str(error):
                return port
            time.sleep(0.05)
    pytest.fail(f"the start script ended with {server.poll()} and no server answers")


def connect(port: int, role: str, password: str) -> psycopg.Connection:
    return psycopg.connect(host="127.0.0.1", port=port, dbname=OWNER, user=role, password=password, autocommit=True)


def test_owner_can_migrate_and_other_roles_cannot_connect(directory: Path) -> None:
    with started(directory) as port:
        url = f"postgresql://{OWNER}:for%20owner's%20eyes@127.0.0.1:{port}/{OWNER}"
        run({"CLOISTER_DATABASE_URL": url, "CLOISTER_DATABASE_SERVICE_ROLE": SERVICE})
        with connect(port, SERVICE, "for service") as service:
            assert service.execute("SELECT count(*) FROM audit_log").fetchone() == (0,)
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                service.execute("ALTER TABLE audit_log DISABLE TRIGGER ALL")

        with psycopg.connect(host=str(directory / "sockets"), port=port, dbname="postgres", user="postgres") as admin:
            admin.execute("CREATE ROLE other LOGIN PASSWORD 'of another'")
        with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
            connect(port, "other", "of another")


def test_changed_password_applies_at_the_next_start_and_keeps_data(directory: Path) -> None:
    with started(directory) as port, connect(port, OWNER, "for owner's eyes") as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS number")
    set_password(directory, "another")

    with started(directory) as port:
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            connect(port, OWNER, "for owner's eyes")
        with connect(port, OWNER, "another") as connection:
            assert connection.execute("SELECT number FROM kept").fetchone() == (1,)


def test_interrupted_first_start_is_repeated(directory: Path) -> None:
    (directory / "volume/data.new").mkdir()
    (directory / "volume/data.new/PG_VERSION").write_text("18\n")

    with started(directory) as port, connect(port, OWNER, "for owner's eyes") as connection:
        assert connection.execute("SELECT current_user").fetchone() == (OWNER,)
