"""``cloister audit``: what was deleted, and who changed what."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from service.cli.database import DEFAULT_DATA_DIR, DataDir, stack_database
from service.cli.durations import parse_duration
from service.db import query
from service.projects import find_project


def parse_since(text: str, now: datetime) -> datetime:
    """A date or time in ISO 8601 (UTC where it names no zone), or a length of time before ``now``.

    Raises:
        typer.BadParameter: it is neither.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return now - parse_duration(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _record(row: dict[str, Any]) -> dict[str, Any]:
    """A row of ``audit_log`` as JSON can hold it."""
    return {
        "id": row["id"],
        "at": row["at"].astimezone(UTC).isoformat(),
        "project_id": row["project_id"],
        "project": row["project_name"],
        "actor": row["actor"],
        "type": row["type"],
        "object_id": row["object_id"],
        "size_bytes": row["size_bytes"],
        "sha256": row["sha256"].hex() if row["sha256"] else None,
        "data": row["data"],
    }


def _line(record: dict[str, Any]) -> str:
    content = f"  {record['size_bytes']} bytes, SHA-256 {record['sha256']}" if record["sha256"] else ""
    data = json.dumps(record["data"], ensure_ascii=False, sort_keys=True)
    where = record["project"] or record["project_id"]
    return f"{record['at']}  {where}  {record['actor']}  {record['type']}  {record['object_id']}{content}  {data}"


def audit(
    *,
    project: Annotated[str | None, typer.Option(help="Only of this project, by name or id.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="7d", help="Only since a date (2026-01-31), or for the last days or hours.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Show what was deleted, with its digest, and who changed projects and keys; the oldest first."""
    start = parse_since(since, datetime.now(UTC)) if since else None
    with stack_database(data_dir) as pool:
        project_id = find_project(pool, project).id if project else None
        with pool.connection() as connection, connection.cursor("audit_log") as rows:
            # A cursor on the server: a log of years need not fit into memory.
            for row in rows.execute(query("audit_log"), {"project_id": project_id, "since": start}):
                record = _record(row)
                print(json.dumps(record, ensure_ascii=False) if as_json else _line(record))
