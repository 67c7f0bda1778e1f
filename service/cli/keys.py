"""``cloister keys``: the API keys of a stack."""

from typing import Annotated

import typer

from service.api_keys import create_api_key, ensure_default_project, list_api_keys, revoke_api_key
from service.cli.database import DEFAULT_DATA_DIR, DataDir, stack_database
from service.errors import CloisterError

app = typer.Typer(help="API keys of a running stack.", no_args_is_help=True)


@app.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="Tells keys apart.")], data_dir: DataDir = DEFAULT_DATA_DIR
) -> None:
    """Make a key and show it, this once."""
    with stack_database(data_dir) as pool:
        print(create_api_key(pool, project_id=ensure_default_project(pool).id, name=name))


@app.command("list")
def list_keys(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Show every key's id, name and last four characters."""
    with stack_database(data_dir) as pool:
        for key in list_api_keys(pool):
            state = f"revoked {key.revoked_at:%Y-%m-%d}" if key.revoked_at else "valid"
            print(f"{key.id}  …{key.hint}  {key.created_at:%Y-%m-%d}  {state}  {key.name}")


@app.command("revoke")
def revoke_key(key_id: str, data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Refuse a key from now on."""
    with stack_database(data_dir) as pool:
        if not revoke_api_key(pool, key_id):
            raise CloisterError(f"there is no key {key_id}; see `cloister keys list`")
    print(f"revoked {key_id}")
