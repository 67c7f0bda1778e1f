"""``cloister keys``: the API keys of a stack."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from service.api_keys import DEFAULT_SCOPES, Scope, create_api_key, list_api_keys, revoke_api_key
from service.cli.database import DEFAULT_DATA_DIR, DataDir, stack_database
from service.cli.durations import parse_duration
from service.errors import CloisterError
from service.projects import DEFAULT_PROJECT_NAME, ensure_default_project, find_project

app = typer.Typer(help="API keys of a stack.", no_args_is_help=True)


@app.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="Tells keys apart.")],
    *,
    project: Annotated[str, typer.Option(help="The project that the key reaches, by name or id.")] = (
        DEFAULT_PROJECT_NAME
    ),
    scope: Annotated[
        list[Scope] | None,
        typer.Option(
            help="read: see all of the project; submit: upload, create, cancel, delete; admin: audit log and webhooks. "
            "May be repeated; read and submit by default."
        ),
    ] = None,
    expires_in: Annotated[
        str | None, typer.Option(metavar="30d", help="Days, hours (12h) or minutes (90m) until the key is refused.")
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Make a key and show it, this once."""
    expires_at = datetime.now(UTC) + parse_duration(expires_in) if expires_in else None
    with stack_database(data_dir) as pool:
        is_default = project == DEFAULT_PROJECT_NAME
        owner = ensure_default_project(pool) if is_default else find_project(pool, project)
        print(
            create_api_key(pool, project_id=owner.id, name=name, scopes=scope or DEFAULT_SCOPES, expires_at=expires_at)
        )


@app.command("list")
def list_keys(
    *,
    project: Annotated[str | None, typer.Option(help="Only the keys of this project.")] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Show every key's id, last four characters, project, scopes, state and name."""
    now = datetime.now(UTC)
    with stack_database(data_dir) as pool:
        project_id = find_project(pool, project).id if project else None
        for key in list_api_keys(pool, project_id=project_id):
            created = f"{key.created_at:%Y-%m-%d}"
            scopes = ",".join(key.scopes)
            print(f"{key.id}  …{key.hint}  {created}  {key.project_name}  {scopes}  {key.state(now)}  {key.name}")


@app.command("revoke")
def revoke_key(key_id: str, data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Refuse a key from now on."""
    with stack_database(data_dir) as pool:
        if not revoke_api_key(pool, key_id):
            raise CloisterError(f"there is no key {key_id}; see `cloister keys list`")
    print(f"revoked {key_id}")
