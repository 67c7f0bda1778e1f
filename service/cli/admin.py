"""Commands for the operator of a stack, on its database: ``keys``, ``projects``, ``webhooks`` and ``secrets``."""

import os
import pwd
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Final

import psycopg
import typer
from cryptography.fernet import MultiFernet

from service.api_keys import create_api_key, list_api_keys, revoke_api_key
from service.audit.log import OPERATOR, Actor
from service.cli.options import DEFAULT_DATA_DIR, DataDir, parse_duration
from service.db import Pool, open_pool
from service.errors import CloisterError
from service.projects import (
    DEFAULT_PROJECT_NAME,
    archive_project,
    create_project,
    ensure_default_project,
    erase_project,
    erasure_progress,
    find_project,
    list_projects,
    set_project,
)
from service.quotas import Limits
from service.scopes import DEFAULT_SCOPES, Scope
from service.stored_secrets import KEYS_VARIABLE, encrypt_stored_secrets, read_encryption_keys
from service.webhooks import EventType, create_endpoint, delete_endpoint, list_endpoints

keys = typer.Typer(help="Manage the API keys of a stack.", no_args_is_help=True)
projects = typer.Typer(help="Manage the projects of a stack and their limits.", no_args_is_help=True)
webhooks = typer.Typer(help="Manage the webhook endpoints of a stack.", no_args_is_help=True)
secrets = typer.Typer(help="Manage the encryption of the secrets in a stack's database.", no_args_is_help=True)

_DAY_S: Final = 24 * 3600
_PROGRESS_INTERVAL_S: Final = 2.0
_MAX_DIGITS: Final = 19
_MAX_KEY_DAYS: Final = re.compile(r"[1-9]\d{0,4}")
_MAX_OPERATOR_LENGTH: Final = 100
# The largest value of each column of the table projects.
_MAX_LIMITS: Final = {
    "max_batches_in_progress": (1 << 31) - 1,
    "max_enqueued_requests": (1 << 63) - 1,
    "max_enqueued_tokens": (1 << 63) - 1,
    "max_stored_bytes": (1 << 63) - 1,
    "retention_days": 3650,
}

Project = Annotated[str, typer.Option(help="The project, by name or id.")]
MaxBatches = Annotated[str | None, typer.Option(metavar="N", help="Limit for open batches.")]
MaxRequests = Annotated[str | None, typer.Option(metavar="N", help="Limit for requests of open batches.")]
MaxTokens = Annotated[
    str | None,
    typer.Option(metavar="N", help="Limit for input tokens of open batches, estimated as bytes / 4."),
]
MaxBytes = Annotated[str | None, typer.Option(metavar="N", help="Limit for the bytes of all files, including results.")]
Operator = Annotated[
    str,
    typer.Option(envvar="CLOISTER_OPERATOR", help="Your name for the audit log.", show_default="your user and host"),
]
RetentionDays = Annotated[
    str | None,
    typer.Option(metavar="DAYS", help="The most days to keep files and ended batches."),
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
        with psycopg.connect(url, connect_timeout=5):
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


@keys.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="A name for the key.")],
    *,
    project: Annotated[str, typer.Option(help="The project that the key belongs to, by name or id.")] = (
        DEFAULT_PROJECT_NAME
    ),
    scope: Annotated[
        list[Scope] | None,
        typer.Option(
            help="read: list and download everything in the project; submit: upload, create, pause, resume, cancel and "
            "delete; admin: audit log and webhooks. May be repeated. Default: read and submit."
        ),
    ] = None,
    expires_in: Annotated[
        str | None, typer.Option(metavar="30d", help="Days, hours (12h) or minutes (90m) until the key expires.")
    ] = None,
    operator: Operator = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Create a key and print it. It cannot be shown again."""
    expires_at = datetime.now(UTC) + parse_duration(expires_in) if expires_in else None
    actor = operator_actor(operator)
    with stack_database(data_dir) as pool:
        is_default = project == DEFAULT_PROJECT_NAME
        owner = ensure_default_project(pool, actor=actor) if is_default else find_project(pool, project)
        scopes = scope or DEFAULT_SCOPES
        print(create_api_key(pool, project_id=owner.id, name=name, scopes=scopes, expires_at=expires_at, actor=actor))


@keys.command("list")
def list_keys(
    *,
    project: Annotated[str | None, typer.Option(help="List the keys of this project only.")] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """List the keys: id, last four characters, date, project, scopes, state, last use and name.

    The state counts the maximum lifetime in CLOISTER_MAX_KEY_DAYS, which every pod of a stack has.
    """
    now = datetime.now(UTC)
    max_days = os.environ.get("CLOISTER_MAX_KEY_DAYS", "")
    max_lifetime = timedelta(days=int(max_days)) if _MAX_KEY_DAYS.fullmatch(max_days) else None
    with stack_database(data_dir) as pool:
        project_id = find_project(pool, project).id if project else None
        for key in list_api_keys(pool, project_id=project_id, max_lifetime=max_lifetime):
            created = f"{key.created_at:%Y-%m-%d}"
            scopes = ",".join(key.scopes)
            used = f"used {key.last_used_at:%Y-%m-%d}" if key.last_used_at else "never used"
            print(
                f"{key.id}  …{key.hint}  {created}  {key.project_name}  {scopes}  {key.state(now)}  {used}  {key.name}"
            )


@keys.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="The id of the key.")],
    *,
    operator: Operator = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Revoke a key. The server refuses it at once."""
    with stack_database(data_dir) as pool:
        if not revoke_api_key(pool, key_id, actor=operator_actor(operator)):
            raise CloisterError(f"there is no key {key_id}; `cloister keys list` lists the keys")
    print(f"revoked {key_id}")


def parse_limits(options: dict[str, str | None]) -> dict[str, int | None]:
    """Return the columns of the table ``projects`` to change.

    Args:
        options: a value for each option, by name: a whole number, ``none`` for no limit, or None to leave it as it is.

    Raises:
        typer.BadParameter: a value is neither a whole number in range nor ``none``.
    """
    changes: dict[str, int | None] = {}
    for name, text in options.items():
        if text is None:
            continue
        is_retention = name == "retention_days"
        low, high = int(is_retention), _MAX_LIMITS[name]
        is_number = text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
        if text != "none" and not (is_number and low <= int(text) <= high):
            raise typer.BadParameter(
                f"{text!r} is neither a whole number from {low} to {high} nor none",
                param_hint=f"--{name.replace('_', '-')}",
            )
        number = None if text == "none" else int(text)
        if is_retention:
            changes["retention_s"] = None if number is None else number * _DAY_S
        else:
            changes[name] = number
    return changes


@projects.command("create")
def create(
    name: Annotated[str, typer.Argument(help="A name for the project.")],
    *,
    max_batches_in_progress: MaxBatches = None,
    max_enqueued_requests: MaxRequests = None,
    max_enqueued_tokens: MaxTokens = None,
    max_stored_bytes: MaxBytes = None,
    retention_days: RetentionDays = None,
    operator: Operator = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Create a project and print its id. By default a project has no limits."""
    limits: dict[str, Any] = parse_limits(
        {
            "max_batches_in_progress": max_batches_in_progress,
            "max_enqueued_requests": max_enqueued_requests,
            "max_enqueued_tokens": max_enqueued_tokens,
            "max_stored_bytes": max_stored_bytes,
            "retention_days": retention_days,
        }
    )
    retention_s = limits.pop("retention_s", None)
    with stack_database(data_dir) as pool:
        actor = operator_actor(operator)
        print(create_project(pool, name, limits=Limits(**limits), retention_s=retention_s, actor=actor).id)


@projects.command("list")
def show(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """List the projects with their limits and current use."""
    with stack_database(data_dir) as pool:
        for each in list_projects(pool):
            state = f"since {each.created_at:%Y-%m-%d}"
            if each.archived_at:
                state = f"archived {each.archived_at:%Y-%m-%d}"
            print(f"{each.name}  {each.id}  {state}")
            for label, used, limit in (
                ("batches in progress", each.use.batches, each.limits.max_batches_in_progress),
                ("enqueued requests", each.use.requests, each.limits.max_enqueued_requests),
                ("enqueued tokens", each.use.tokens, each.limits.max_enqueued_tokens),
                ("stored bytes", each.use.stored_bytes, each.limits.max_stored_bytes),
            ):
                print(f"  {label:<19}  {used:,} of {'no limit' if limit is None else f'{limit:,}'}")
            days = None if each.retention_s is None else each.retention_s / _DAY_S
            print(f"  {'retention':<19}  {'default of the stack' if days is None else f'{days:g} days'}")


@projects.command("set")
def change(
    name: Annotated[str, typer.Argument(help="The project, by name or id.")],
    *,
    max_batches_in_progress: MaxBatches = None,
    max_enqueued_requests: MaxRequests = None,
    max_enqueued_tokens: MaxTokens = None,
    max_stored_bytes: MaxBytes = None,
    retention_days: RetentionDays = None,
    operator: Operator = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Change limits; `none` removes a limit. Existing batches and files stay."""
    changes = parse_limits(
        {
            "max_batches_in_progress": max_batches_in_progress,
            "max_enqueued_requests": max_enqueued_requests,
            "max_enqueued_tokens": max_enqueued_tokens,
            "max_stored_bytes": max_stored_bytes,
            "retention_days": retention_days,
        }
    )
    if not changes:
        raise typer.BadParameter("give at least one limit; `cloister projects set --help` lists them")
    with stack_database(data_dir) as pool:
        set_project(pool, find_project(pool, name), changes, actor=operator_actor(operator))
    print(f"changed {name}")


@projects.command("archive")
def archive(
    name: Annotated[str, typer.Argument(help="The project, by name or id.")],
    *,
    operator: Operator = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Archive a project. Its keys are refused; its batches continue; its files are deleted when they expire."""
    with stack_database(data_dir) as pool:
        archive_project(pool, find_project(pool, name), actor=operator_actor(operator))
    print(f"archived {name}")


@projects.command("delete")
def delete(
    name: Annotated[str, typer.Argument(help="The project, by name or id.")],
    *,
    erase: Annotated[bool, typer.Option("--erase", help="Confirm that everything in it is deleted for ever.")] = False,
    wait: Annotated[bool, typer.Option(help="Show the progress until the project is gone.")] = True,
    operator: Operator = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Erase a project: batches, files, results, webhooks, keys. Audit log and receipts stay.

    The reconciler does it in the background, also after an interruption. It takes up to an hour
    longer than the project's jobs, whose URLs must expire first. Run the command again with the
    id of the project to see the progress.
    """
    if not erase:
        raise typer.BadParameter(
            "give --erase to delete everything in the project; `cloister projects archive` refuses its keys only"
        )
    with stack_database(data_dir) as pool:
        project = find_project(pool, name)
        is_new = erase_project(pool, project, actor=operator_actor(operator))
        print(f"{'erasing' if is_new else 'still erasing'} {project.id}", flush=True)
        shown = ""
        while wait and (left := erasure_progress(pool, project)) is not None:
            text = (
                f"left: {left.open_batches} open batches, {left.batches} batches, {left.files} files, {left.jobs} jobs"
            )
            if left.urls_expire_at:
                text += f"; URLs of jobs expire at {left.urls_expire_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
            if text != shown:
                print(text, flush=True)
            shown = text
            time.sleep(_PROGRESS_INTERVAL_S)
    if wait:
        print(f"erased {project.id}")


@webhooks.command("create")
def create_webhook(
    url: Annotated[str, typer.Argument(help="The URL that receives the messages.")],
    *,
    project: Project = DEFAULT_PROJECT_NAME,
    event: Annotated[
        list[EventType] | None,
        typer.Option(help="An event to send. May be repeated. Default: every end of a batch."),
    ] = None,
    name: Annotated[str, typer.Option(help="A name for the endpoint.")] = "",
    operator: Operator = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Create an endpoint and print its id and the secret that signs its messages. The secret cannot be shown again."""
    with stack_database(data_dir) as pool:
        owner = find_project(pool, project)
        endpoint, secret = create_endpoint(
            pool,
            stack_encryption_keys(data_dir),
            project_id=owner.id,
            url=url,
            events=event or list(EventType),
            name=name,
            actor=operator_actor(operator),
            # The reconciler checks the address before each message; this command may run elsewhere.
            networks=(ip_network("0.0.0.0/0"), ip_network("::/0")),
        )
    print(f"{endpoint.id}  {secret}")


@webhooks.command("list")
def list_webhooks(*, project: Project = DEFAULT_PROJECT_NAME, data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """List the endpoints of a project, the newest first."""
    with stack_database(data_dir) as pool:
        for endpoint in list_endpoints(pool, project_id=find_project(pool, project).id):
            created = f"{endpoint.created_at:%Y-%m-%d}"
            print(f"{endpoint.id}  {created}  {','.join(endpoint.events)}  {endpoint.url}  {endpoint.name}".rstrip())


@webhooks.command("delete")
def delete_webhook(
    endpoint_id: Annotated[str, typer.Argument(help="The id of the endpoint.")],
    *,
    operator: Operator = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Delete an endpoint and its pending messages."""
    with stack_database(data_dir) as pool:
        actor = operator_actor(operator)
        if not delete_endpoint(pool, project_id=None, endpoint_id=endpoint_id, actor=actor):
            raise CloisterError(f"there is no webhook endpoint {endpoint_id}; `cloister webhooks list` lists them")
    print(f"deleted {endpoint_id}")


@secrets.command("rotate")
def rotate_secrets(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Encrypt all webhook secrets again, under the first key in CLOISTER_ENCRYPTION_KEYS_FILE.

    Put a new key first in the file and keep the old one. Once the processes have restarted, run this; then remove the
    old key.
    """
    with stack_database(data_dir) as pool, pool.connection() as connection:
        count = encrypt_stored_secrets(connection, stack_encryption_keys(data_dir))
    print(f"webhook secrets encrypted under the first key: {count}")
