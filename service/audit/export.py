"""Export of the sealed audit log: lines of JSON in a file, or messages to a syslog server over TLS.

Entries follow the order of the chain. Their positions have no gap, so a receiver notices an entry that is missing or
comes twice.
"""

import contextlib
import json
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from service.audit.chain import SealedEntry, position_of, sealed_entries
from service.db import Pool, query
from service.db.rows import fetch_value
from service.errors import CloisterError

_MESSAGES_PER_CONNECTION: Final = 500
_LONGEST_LINE: Final = 1 << 20
_TIMEOUT_S: Final = 30.0
# Facility 13, log audit, with severity 5, notice, or 4, warning (RFC 5424, section 6.2.1).
_NOTICE: Final = 13 * 8 + 5
_WARNING: Final = 13 * 8 + 4


def export_lines(pool: Pool, write: Callable[[str], object], *, since_seq: int = 0) -> None:
    """Write each sealed entry after another one as a line of JSON.

    Args:
        pool: the database.
        write: takes a line, with its line end.
        since_seq: sequence number of the last entry that was exported before; 0 for none.

    Raises:
        CloisterError: that entry does not exist.
    """
    with pool.connection() as connection:
        after = position_of(connection, since_seq) if since_seq else 0
        for entry in sealed_entries(connection, after=after):
            write(f"{entry.as_json()}\n")


def export_to_file(pool: Pool, path: Path, *, since_seq: int = 0) -> None:
    """Append the sealed entries that a file lacks. A line that an interrupted export left incomplete is replaced.

    Args:
        pool: the database.
        path: the file; a new one is readable by its owner only.
        since_seq: where an empty file starts, as in ``export_lines``.

    Raises:
        CloisterError: the file cannot be written, or was not made by an export of this log.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _LONGEST_LINE)
            file.seek(start)
            tail = file.read()
            complete = tail[: tail.rfind(b"\n") + 1]
            file.seek(start + len(complete))
            file.truncate()
            if complete:
                since_seq = int(json.loads(complete.splitlines()[-1])["seq"])
            export_lines(pool, lambda text: file.write(text.encode()), since_seq=since_seq)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CloisterError(f"--to {path}: cannot be written: {error.strerror}. Choose another file") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CloisterError(f"--to {path}: its last line is no entry of an audit log. Choose a new file") from error


def export_to_syslog(pool: Pool, host: str, port: int, *, ca: Path | None = None, since_seq: int | None = None) -> int:
    """Send the sealed entries that a syslog server lacks, and return how many were sent.

    The database keeps the position of each server. It moves after the server has confirmed the end of a connection. If
    a connection breaks before that, the next export sends the same entries again.

    Args:
        pool: the database.
        host: name or address of the server, which its certificate must name.
        port: TCP port, usually 6514.
        ca: certificates of the authorities to trust, PEM; None for those of the system.
        since_seq: sequence number of the entry to start after, whatever was sent before; 0 for all entries; None to
            continue.

    Raises:
        CloisterError: the server cannot be reached, or its certificate is not trusted.
    """
    target, sent = f"{host}:{port}", 0
    context = _trust(ca)
    with pool.connection() as connection:
        connection.execute(query("add_audit_export"), {"target": target})
        if since_seq is not None:
            position = position_of(connection, since_seq) if since_seq else 0
            connection.execute(query("advance_audit_export"), {"target": target, "position": position})
    while True:
        with pool.connection() as connection:
            after = fetch_value(connection, "lock_audit_export", {"target": target}) or 0
            entries = list(sealed_entries(connection, after=after, limit=_MESSAGES_PER_CONNECTION))
            if not entries:
                return sent
            try:
                _send(entries, host, port, context)
            except OSError as error:
                raise CloisterError(
                    f"--syslog-tls {target}: {error}. Check the address, the server's certificate and --ca; the next "
                    "export continues here"
                ) from error
            position = entries[-1].position
            connection.execute(query("advance_audit_export"), {"target": target, "position": position})
        sent += len(entries)


def _trust(ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise CloisterError(f"--ca {ca}: is not a file with certificates in PEM: {error}") from error


def _send(entries: Sequence[SealedEntry], host: str, port: int, context: ssl.SSLContext) -> None:
    """Send messages in frames with their length (RFC 5425, section 4.3), and wait for the end of the connection.

    Raises:
        OSError: the connection failed.
    """
    with (
        socket.create_connection((host, port), timeout=_TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        for entry in entries:
            message = syslog_message(entry)
            connection.sendall(f"{len(message)} ".encode() + message)
        # Syslog has no acknowledgements. The server answers this after it has read everything; some only disconnect.
        with contextlib.suppress(ssl.SSLEOFError):
            connection.unwrap()


def syslog_message(entry: SealedEntry) -> bytes:
    """Return an entry as a syslog message (RFC 5424): its type is the MSGID, its JSON is the text."""
    kind = str(entry.entry["type"])
    priority = _WARNING if kind == "login.failed" else _NOTICE
    header = f"<{priority}>1 {entry.entry['at']} {socket.gethostname() or '-'} cloister - {kind[:32]} -"
    return f"{header} {entry.as_json()}".encode()
