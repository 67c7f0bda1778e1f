"""Deletion receipts: ``cloister receipts`` for the operator of a stack, ``cloister verify-receipt`` for everyone."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from service.cli.database import stack_database
from service.cli.options import DEFAULT_DATA_DIR, DataDir
from service.db import query
from service.db.rows import fetch_value
from service.errors import CloisterError
from service.projects import find_project
from service.receipts import KEY_VARIABLE, Deletion, Receipt, read_key, verify
from service.signing import public_pem

receipts = typer.Typer(help="Read the signed receipts of deletions.", no_args_is_help=True)


@receipts.command("list")
def list_receipts(
    *,
    project: Annotated[
        str | None, typer.Option(help="Show receipts of this project only, by name or id; by id if it is erased.")
    ] = None,
    object_id: Annotated[str | None, typer.Option("--object", help="Show receipts of this file or batch only.")] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """List the receipts, the oldest first: id, time, project, author, kind, object, size and SHA-256."""
    with stack_database(data_dir) as pool:
        # An erased project has receipts, but no row.
        is_id = project is None or project.startswith("proj_")
        project_id = project if is_id else find_project(pool, project or "").id
        values = {"project_id": project_id, "object_id": object_id}
        with pool.connection() as connection, connection.cursor("receipts") as rows:
            for row in rows.execute(query("all_receipts"), values):
                print(_line(Receipt.from_envelope(row["envelope"]).deletion))


@receipts.command("get")
def get_receipt(
    receipt_id: Annotated[str, typer.Argument(help="The id of the receipt.")], data_dir: DataDir = DEFAULT_DATA_DIR
) -> None:
    """Print a receipt as JSON, for `cloister verify-receipt`."""
    with stack_database(data_dir) as pool, pool.connection() as connection:
        envelope = fetch_value(connection, "receipt_by_id", {"id": receipt_id, "project_id": None})
    if envelope is None:
        raise CloisterError(f"there is no receipt {receipt_id}; `cloister receipts list` lists them")
    print(Receipt.from_envelope(envelope).model_dump_json(indent=2))


@receipts.command("public-key")
def public_key(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Print the public key of the stack, with which everyone can verify its receipts.

    Give it to the people who verify receipts by a way that the stack cannot change, and keep it
    when the key changes: older receipts need it.
    """
    from service.local.layout import layout_of

    named = os.environ.get(KEY_VARIABLE)
    print(public_pem(read_key(Path(named) if named else layout_of(data_dir).receipt_key)), end="")


def verify_receipt(
    file: Annotated[
        typer.FileText, typer.Argument(help="A receipt in JSON, or - for standard input.", encoding="utf-8")
    ],
    *,
    public_key: Annotated[
        typer.FileText,
        typer.Option(help="The public key in PEM, from `cloister receipts public-key`.", encoding="utf-8"),
    ],
) -> None:
    """Verify a receipt offline and print what was deleted. The exit code is 1 if it was changed."""
    try:
        deletion = verify(file.read(), public_key.read())
    except UnicodeDecodeError:
        raise CloisterError(f"{file.name} or {public_key.name} is no text: give a receipt and a public key") from None
    print(_line(deletion))
    print(f"reason: {deletion.reason}")
    for version in deletion.versions:
        print(f"version: {version}")
    print("The signature is valid.")


def _line(deletion: Deletion) -> str:
    at = datetime.fromtimestamp(deletion.deleted_at, UTC).isoformat()
    columns = [deletion.id, at, deletion.project_id or "-", deletion.actor, deletion.kind, deletion.object_id]
    if deletion.sha256:
        columns.append(f"{deletion.size_bytes} bytes, SHA-256 {deletion.sha256}")
    return "  ".join(columns)
