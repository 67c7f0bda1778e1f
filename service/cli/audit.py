"""``cloister audit``: list, verify and export the audit log of a stack."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from service.audit.chain import Head, canonical
from service.audit.chain import verify as verify_chain
from service.audit.export import export_lines, export_to_file, export_to_syslog
from service.cli.database import stack_database
from service.cli.options import DEFAULT_DATA_DIR, DataDir, parse_duration
from service.db import query
from service.errors import CloisterError
from service.projects import find_project

audit = typer.Typer(invoke_without_command=True)

OneProject = Annotated[str | None, typer.Option(help="Show entries of this project only, by name or id.")]
Since = Annotated[
    str | None,
    typer.Option(metavar="7d", help="Show entries since a date (2026-01-31), or of the last days or hours only."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]


@audit.callback()
def show(
    context: typer.Context,
    *,
    project: OneProject = None,
    since: Since = None,
    as_json: AsJson = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """List, verify and export the audit log. Without a command, list it."""
    if context.invoked_subcommand is None:
        list_entries(project=project, since=since, as_json=as_json, data_dir=data_dir)
    elif project or since or as_json or data_dir != DEFAULT_DATA_DIR:
        raise typer.BadParameter(f"give the options after `{context.invoked_subcommand}`")


@audit.command("list")
def list_entries(
    *, project: OneProject = None, since: Since = None, as_json: AsJson = False, data_dir: DataDir = DEFAULT_DATA_DIR
) -> None:
    """List the entries, the oldest first: who did what from where, with sizes and digests of files."""
    start: datetime | None = None
    if since:
        try:
            start = datetime.fromisoformat(since)
            start = start if start.tzinfo else start.replace(tzinfo=UTC)
        except ValueError:
            start = datetime.now(UTC) - parse_duration(since)
    with stack_database(data_dir) as pool:
        project_id = find_project(pool, project).id if project else None
        # A server-side cursor: a log of several years may not fit into memory.
        with pool.connection() as connection, connection.cursor("audit_log") as rows:
            for row in rows.execute(query("audit_log"), {"project_id": project_id, "since": start}):
                entry = canonical(row)
                if as_json:
                    print(json.dumps({**entry, "project": row["project_name"]}, ensure_ascii=False))
                    continue
                owner = row["project_name"] or entry["project_id"] or "-"
                actor = " ".join(filter(None, (entry["actor"], entry["operator"])))
                columns = [entry["at"], owner, actor, entry["type"], entry["object_id"]]
                if entry["client_address"]:
                    columns.append(f"from {entry['client_address']}")
                if entry["sha256"]:
                    columns.append(f"{entry['size_bytes']} bytes, SHA-256 {entry['sha256']}")
                columns.append(json.dumps(entry["data"], ensure_ascii=False, sort_keys=True))
                print("  ".join(columns))


@audit.command()
def verify(
    *,
    head: Annotated[
        str | None,
        typer.Option(metavar="SEQ:SHA256", help="A head that was printed before; it must be part of the log."),
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Check that no entry was changed, removed or inserted, and print the head. Keep it for a later `--head`.

    The exit status is 1 if the log is broken; the first broken entry is named.
    """
    expected = Head.parse(head) if head else None
    with stack_database(data_dir) as pool:
        found = verify_chain(pool, expected=expected)
    if found.problem:
        raise CloisterError(
            f"the audit log is broken after {found.entries} good entries: {found.problem}. Compare it with an export "
            "or a backup"
        )
    waiting = f", {found.unsealed} wait for their seal" if found.unsealed else ""
    print(f"{found.entries} entries are unchanged{waiting}; head {found.head or 'none'}")


@audit.command()
def export(
    *,
    since_seq: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Start after the entry with this `seq`; 0 for all entries.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append the entries that this file lacks. Default: print them.")
    ] = None,
    syslog_tls: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Send the entries that this syslog server lacks (RFC 5425)."),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Authorities to trust, PEM; those of the system by default."),
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Export sealed entries as lines of JSON, or to a syslog server. Run it again to export what is new."""
    if to and syslog_tls:
        raise typer.BadParameter("give --to or --syslog-tls, not both")
    if ca and not syslog_tls:
        raise typer.BadParameter("--ca needs --syslog-tls")
    host, _, port = (syslog_tls or "").rpartition(":")
    if syslog_tls and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise typer.BadParameter(f"{syslog_tls!r} is not HOST:PORT, e.g. syslog.acme.example:6514")
    with stack_database(data_dir) as pool:
        if syslog_tls:
            sent = export_to_syslog(pool, host.strip("[]"), int(port), ca=ca, since_seq=since_seq)
            print(f"sent {sent} entries to {syslog_tls}")
        elif to:
            export_to_file(pool, to, since_seq=since_seq or 0)
        else:
            export_lines(pool, lambda line: print(line, end=""), since_seq=since_seq or 0)
