"""``cloister keys``: the API keys of a stack."""

import os
import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

import typer

from service.api_keys import create_api_key, list_api_keys, revoke_api_key
from service.cli.database import Operator, operator_actor, stack_database
from service.cli.options import DEFAULT_DATA_DIR, DataDir, parse_duration
from service.errors import CloisterError
from service.projects import DEFAULT_PROJECT_NAME, ensure_default_project, find_project
from service.scopes import DEFAULT_SCOPES, Scope

keys = typer.Typer(help="Manage the API keys of a stack.", no_args_is_help=True)

_MAX_KEY_DAYS: Final = re.compile(r"[1-9]\d{0,4}")


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
            "delete; admin: audit log and webhooks; operator: usage, costs and capacity of the whole "
            "stack. May be repeated. Default: read and submit."
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
