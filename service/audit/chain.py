"""Chain of digests over the audit log, by which a changed, removed or inserted entry is noticed.

Services add entries; the reconciler seals them. The seal of an entry is the SHA-256 of the previous seal (32 zero bytes
for the first one) followed by the entry in canonical form. Seals are numbered in the order of sealing: an entry whose
transaction commits late is sealed later, and gaps of the sequence ``audit_log.seq`` do not matter.

Who can rewrite both tables can also make a new chain. So an auditor keeps the head, or exports the log, and compares.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC
from typing import Any, Final, Self

import psycopg
from psycopg.rows import DictRow

from service.db import Pool, query
from service.db.rows import fetch_value
from service.errors import CloisterError

SEAL_LOCK: Final = 7_203_003
_GENESIS: Final = bytes(32)
_CHUNK: Final = 1_000
# An entry that commits after so many later ones were sealed is found by the next search of the whole log.
_DISTANCE: Final = 10_000
_COLUMNS: Final = (
    "seq", "id", "project_id", "actor", "operator", "client_address", "request_id", "type", "object_id", "object_seq",
    "size_bytes", "data",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The newest seal: the sequence number of its entry, and its digest."""

    seq: int
    sha256: bytes

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a head that ``cloister audit verify`` printed, ``SEQ:SHA256``.

        Raises:
            CloisterError: the text has another form.
        """
        seq, _, digest = text.strip().partition(":")
        try:
            head = cls(seq=int(seq), sha256=bytes.fromhex(digest))
        except ValueError:
            head = cls(seq=0, sha256=b"")
        if len(head.sha256) != len(_GENESIS):
            raise CloisterError(f"{text!r} is not a head: give SEQ:SHA256 as `cloister audit verify` printed it")
        return head

    def __str__(self) -> str:
        return f"{self.seq}:{self.sha256.hex()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedEntry:
    """An entry with its place in the chain.

    Attributes:
        position: its number in the chain, from 1 on.
        seal: the digest of the previous seal and the entry.
        entry: the entry in its canonical form, before it is encoded.
    """

    position: int
    seal: bytes
    entry: Mapping[str, Any]

    def as_json(self) -> str:
        """Return one line of JSON in ASCII: the entry, its ``position`` and its ``seal``."""
        return _encoded({**self.entry, "position": self.position, "seal": self.seal.hex()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Result of checking the whole chain.

    Attributes:
        entries: checked entries.
        head: the newest seal; None if nothing is sealed.
        unsealed: entries that wait for their seal.
        problem: the first broken entry and what is wrong with it; empty if the chain is intact.
    """

    entries: int
    head: Head | None
    unsealed: int
    problem: str


def canonical(row: DictRow) -> dict[str, Any]:
    """Return a row of ``audit_log`` as JSON values: times in UTC with microseconds, digests in hexadecimal."""
    return {
        **{column: row[column] for column in _COLUMNS},
        "at": row["at"].astimezone(UTC).isoformat(timespec="microseconds"),
        "sha256": None if row["sha256"] is None else row["sha256"].hex(),
    }


def _encoded(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def seal_of(previous: bytes, row: DictRow) -> bytes:
    """Return the seal of a row of ``audit_log`` that follows another seal."""
    return hashlib.sha256(previous + _encoded(canonical(row)).encode()).digest()


def seal_entries(pool: Pool, *, whole_log: bool = False) -> int:
    """Seal entries of the audit log, at most 1,000, and return how many were sealed.

    Args:
        pool: the database.
        whole_log: search all entries, not only the newest. Do so once in a while.
    """
    with pool.connection() as connection:
        # A reconciler that has lost the lead without noticing it may seal too.
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [SEAL_LOCK])
        last = connection.execute(query("audit_head")).fetchone()
        position, seal = (last["position"], last["sha256"]) if last else (0, _GENESIS)
        values = {"distance": None if whole_log else _DISTANCE, "limit": _CHUNK}
        rows = connection.execute(query("unsealed_audit_log"), values).fetchall()
        seals = [seal := seal_of(seal, row) for row in rows]
        if rows:
            seals_by_column = {
                "positions": list(range(position + 1, position + 1 + len(rows))),
                "seqs": [row["seq"] for row in rows],
                "digests": seals,
            }
            connection.execute(query("insert_seals"), seals_by_column)
    return len(rows)


def newest_head(connection: psycopg.Connection[DictRow]) -> Head | None:
    """Return the newest seal; None if nothing is sealed."""
    row = connection.execute(query("audit_head")).fetchone()
    return Head(seq=row["seq"], sha256=row["sha256"]) if row else None


def is_in_chain(connection: psycopg.Connection[DictRow], head: Head) -> bool:
    """Return whether a head of an earlier time belongs to the history of this database."""
    return bool(fetch_value(connection, "is_seal", {"seq": head.seq, "sha256": head.sha256}))


def position_of(connection: psycopg.Connection[DictRow], seq: int) -> int:
    """Return the position of an entry in the chain, by its sequence number.

    Raises:
        CloisterError: that entry does not exist or is not sealed.
    """
    position = fetch_value(connection, "position_of_entry", {"seq": seq})
    if position is None:
        raise CloisterError(f"the audit log has no sealed entry {seq}; entries are sealed within seconds")
    return int(position)


def sealed_entries(
    connection: psycopg.Connection[DictRow], *, after: int = 0, limit: int | None = None
) -> Iterator[SealedEntry]:
    """Yield entries in the order of the chain.

    Args:
        connection: a transaction; the rows are read through a cursor in it.
        after: position to start after.
        limit: the most entries; None for all.

    Raises:
        CloisterError: an entry was deleted.
    """
    with connection.cursor("sealed_audit_log") as rows:
        for row in rows.execute(query("sealed_audit_log"), {"after": after, "limit": limit}):
            if row["seq"] is None:
                raise CloisterError(
                    f"the entry {row['sealed_seq']} of the audit log was deleted; run `cloister audit verify`"
                )
            yield SealedEntry(position=row["position"], seal=row["seal"], entry=canonical(row))


def verify(pool: Pool, *, expected: Head | None = None) -> Verification:
    """Check the whole chain.

    Args:
        pool: the database.
        expected: a head that an auditor has kept. It must be in the chain, or the log was truncated or rewritten.
    """
    previous, head, problem, entries = _GENESIS, None, "", 0
    is_expected_found = expected is None
    with pool.connection() as connection, connection.cursor("verified_audit_log") as rows:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        for row in rows.execute(query("sealed_audit_log"), {"after": 0, "limit": None}):
            seq = row["sealed_seq"]
            if row["position"] != entries + 1:
                problem = f"{row['position'] - entries - 1} seals before the entry {seq} are missing"
            elif row["seq"] is None:
                problem = f"the entry {seq} was deleted"
            elif seal_of(previous, row) != row["seal"]:
                problem = f"the entry {seq} ({row['type']}, {row['at']:%Y-%m-%d %H:%M:%S %Z}) or its seal was changed"
            if problem:
                break
            entries += 1
            previous = row["seal"]
            head = Head(seq=seq, sha256=previous)
            is_expected_found = is_expected_found or head == expected
        unsealed = fetch_value(connection, "count_unsealed", {}) or 0
    if not problem and not is_expected_found:
        problem = f"the head {expected} is not in the chain: the log was truncated or rewritten"
    return Verification(entries=entries, head=head, unsealed=unsealed, problem=problem)
