"""Access of the operator's commands to a stack: its database, its encryption keys, and the operator's name."""

import os
import pwd
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import psycopg
import typer
from cryptography.fernet import MultiFernet

from service.audit.log import OPERATOR, Actor
from service.db import Pool, open_pool
from service.db.login import connection_string
from service.errors import CloisterError
from service.stored_secrets import KEYS_VARIABLE, read_encryption_keys

_MAX_OPERATOR_LENGTH: Final = 100

Operator = Annotated[
    str,
    typer.Option(envvar="CLOISTER_OPERATOR", help="Your name for the audit log.", show_default="your user and host"),
]


def operator_actor(name: str) -> Actor:
    """Return the operator as the author of changes: a given name, or the user and the host of this process.

    Raises:
        typer.BadParameter: the name is too long or has a line break or another control character.
    """
    if not name.isprintable() or len(name) > _MAX_OPERATOR_LENGTH:
        raise typer.BadParameter(f"give 1 to {_MAX_OPERATOR_LENGTH} printable characters", param_hint="--operator")
    if name:
        return replace(OPERATOR, operator=name)
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user may have no name
        user = str(os.geteuid())
    return replace(OPERATOR, operator=f"{user}@{socket.gethostname()}")


@contextmanager
def stack_database(data_dir: Path) -> Iterator[Pool]:
    """Open the database that CLOISTER_DATABASE_URL names, or else that of a running ``cloister local``.

    Raises:
        CloisterError: the database does not answer.
    """
    from service.local.layout import layout_of
    from service.local.postgres import SERVICE

    named = os.environ.get("CLOISTER_DATABASE_URL")
    url = named or layout_of(data_dir).database_url(SERVICE)
    try:
        with psycopg.connect(connection_string(url), connect_timeout=5):
            pass
    except psycopg.OperationalError as error:
        if named:
            raise CloisterError(f"the database that CLOISTER_DATABASE_URL names does not answer ({error})") from error
        raise CloisterError(
            f"no database answers for {data_dir}: start `cloister local --data-dir {data_dir}` first, "
            f"or set CLOISTER_DATABASE_URL ({error})"
        ) from error
    with open_pool(url, max_size=1) as pool:
        yield pool


def stack_encryption_keys(data_dir: Path) -> MultiFernet | None:
    """Read the keys that CLOISTER_ENCRYPTION_KEYS_FILE names, or else those of ``cloister local``; None without any.

    Raises:
        SettingsError: the file is invalid.
    """
    from service.local.layout import layout_of

    if named := os.environ.get(KEYS_VARIABLE):
        return read_encryption_keys(Path(named))
    path = layout_of(data_dir).encryption_keys
    is_local = not os.environ.get("CLOISTER_DATABASE_URL")
    return read_encryption_keys(path) if is_local and path.exists() else None
