"""Deletion of orphans: objects that belong to no file, no batch and no job, and unfinished uploads.

An upload whose process died before it wrote the row leaves one, and so does a job that writes after its batch is gone.
A search lists the object store a few thousand objects a minute, asks the database once for each page which of the old
objects belong to something, and continues after the last key if the process is replaced. Only the layouts of
``ray_job.contract.object_keys`` that hold work of projects are searched: weights, backups and prompt rules can be in
the same bucket.

Each database marks the object store as its own, with the head of its audit log. Nothing is deleted while there is a
mark of another database, or of a later state of this one: after a restore, objects of the lost time look like orphans,
and a second restore to a later moment needs them.

An object is old enough when no upload, lease or signed URL that was valid at its last change can still matter. A file
is written before its row, within one request; a batch has its row before its objects.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from threading import Event
from typing import Final

import structlog

from ray_job.contract.object_keys import STACKS_PREFIX, stack_key
from service.audit.chain import Head, is_in_chain, newest_head
from service.audit.log import RETENTION
from service.db import query
from service.errors import ObjectNotFoundError, ObjectStoreError
from service.ports import ListedObject, ObjectStore
from service.receipts import write_receipt
from service.reconciler.backends import Backends
from service.reconciler.repeating import repeat

logger = structlog.get_logger(__name__)

SEARCHED: Final = ("batches/", "doctor/", "files/", "jobs/")
"""Prefixes that are searched, in lexical order."""
SHARED_STORE: Final = (
    "orphans are not deleted, because the object store was also used with another database, whose objects look like "
    "orphans here. If another stack uses it, give each its own bucket or prefix. If the other database is gone for "
    "ever, delete the objects under stacks/ that are listed here"
)
RESTORED: Final = (
    "orphans are not deleted, because the object store was used with a later state of this database: it was restored, "
    "and objects of the lost time look like orphans. If you keep this state of the database for ever, delete the "
    "objects under stacks/ that are listed here"
)
INTERVAL_S: Final = 6 * 3600
_PASS_INTERVAL_S: Final = 60.0
# A restore to a moment after the last mark is not noticed. Each mark is one more version on a bucket with versions.
_MARK_INTERVAL: Final = timedelta(hours=1)
_PAGE: Final = 1_000
# Objects that a pass looks at. Ten million take about three hours.
_PAGES_PER_PASS: Final = 50


def keep_searching(backends: Backends, over: Event) -> None:
    """Search for orphans until ``over`` is set: a pass each minute, and after a whole search a pause of six hours."""
    repeat(lambda: search(backends, over), over, interval_s=_PASS_INTERVAL_S, failure="orphans.search_failed")


def search(backends: Backends, over: Event, *, pages: int = _PAGES_PER_PASS) -> None:
    """Search the next pages of the object store if a search is due, and delete the orphans among them.

    An orphan that the store keeps, for example under a legal hold, is tried again by the next search.

    Args:
        backends: the backends.
        over: stops the search.
        pages: the most pages.

    Raises:
        ObjectStoreError: the store cannot be listed; the next pass continues.
        psycopg.OperationalError: Postgres cannot be reached; the next pass continues.
    """
    with backends.pool.connection() as connection:
        row = connection.execute(query("orphan_search")).fetchone()
    if row is None:
        return
    others, is_restored = _marks(backends, row["stack_id"])
    if not row["is_due"]:
        return
    if others or is_restored:
        if others:
            logger.error("orphans.shared_store", reason=SHARED_STORE, stacks=others)
        if is_restored:
            logger.error("orphans.restored_database", reason=RESTORED, stacks=[stack_key(row["stack_id"])])
        with backends.pool.connection() as connection:
            connection.execute(query("record_orphan_search"), {"last_key": "", "pause_s": INTERVAL_S})
        return
    old = datetime.now(UTC) - timedelta(seconds=backends.orphan_age_s)
    if not row["last_key"]:
        _abort_uploads(backends, old)
        with backends.pool.connection() as connection:
            left = [each["key"] for each in connection.execute(query("known_orphans"))]
        _delete_all(backends, _without_owner(backends, left), over)
    listed = _objects(backends.store, row["last_key"])
    for _ in range(pages):
        page = list(itertools.islice(listed, _PAGE))
        _delete_all(backends, _without_owner(backends, [each.key for each in page if each.modified_at < old]), over)
        if over.is_set():
            return
        is_last = len(page) < _PAGE
        values = {"last_key": "" if is_last else page[-1].key, "pause_s": INTERVAL_S if is_last else 0}
        with backends.pool.connection() as connection:
            connection.execute(query("record_orphan_search"), values)
        if is_last:
            return


def _marks(backends: Backends, stack_id: str) -> tuple[list[str], bool]:
    """Return the marks of other databases, and whether the own one is of a later state; renew it if it is not.

    Args:
        backends: the backends.
        stack_id: id of this database; a restored one has the same.
    """
    own, store = stack_key(stack_id), backends.store
    found = {each.key: each.modified_at for each in store.objects(STACKS_PREFIX)}
    marked = b"".join(store.read(own)).decode() if own in found else ""
    with backends.pool.connection() as connection:
        is_restored = bool(marked) and not is_in_chain(connection, Head.parse(marked))
        head = newest_head(connection)
    is_due = own not in found or datetime.now(UTC) - found[own] > _MARK_INTERVAL
    if is_due and not is_restored:
        store.put(own, [str(head).encode()] if head else [])
    return [key for key in found if key != own], is_restored


def _abort_uploads(backends: Backends, old: datetime) -> None:
    for prefix in SEARCHED:
        try:
            aborted = backends.store.abort_uploads(prefix, before=old)
        except ObjectStoreError as error:
            logger.warning("orphans.uploads_not_aborted", prefix=prefix, error=str(error))
        else:
            backends.metrics.removals.labels(object="upload").inc(aborted)


def _objects(store: ObjectStore, after: str) -> Iterator[ListedObject]:
    for prefix in SEARCHED:
        if after < prefix or after.startswith(prefix):
            yield from store.objects(prefix, after=after)


def _without_owner(backends: Backends, keys: Sequence[str]) -> list[str]:
    """Return the keys that belong to no file, batch or job."""
    if not keys:
        return []
    with backends.pool.connection() as connection:
        rows = connection.execute(query("owners_of_objects"), {"ids": list({_owner(key) for key in keys})})
        owners = {row["id"] for row in rows}
    return [key for key in keys if _owner(key) not in owners]


def _owner(key: str) -> str:
    """Return the id of the file, batch or job that a key belongs to. An object of the doctor belongs to nothing."""
    return key.split("/")[1]


def _delete_all(backends: Backends, keys: Sequence[str], over: Event) -> None:
    for key in keys:
        if over.is_set():
            return
        try:
            _delete(backends, key)
        except ObjectStoreError as error:
            logger.warning("orphans.store_refused", key=key, error=str(error))


def _delete(backends: Backends, key: str) -> None:
    """Delete an orphan and write its receipt. Its content is read once, for the digest.

    The row of the orphan exists from before the deletion until its receipt, so that a crash in between loses none.
    """
    try:
        size_bytes, sha256 = _measure(backends.store.read(key))
    except ObjectNotFoundError:
        size_bytes, sha256 = None, None  # only hidden versions are left, or an earlier search has deleted it
    with backends.pool.connection() as connection:
        connection.execute(query("insert_orphan"), {"key": key, "size_bytes": size_bytes, "sha256": sha256})
    versions = backends.store.delete(key)
    with backends.pool.connection() as connection:
        content = connection.execute(query("remove_orphan"), {"key": key}).fetchone() or {}
        batch = connection.execute(query("project_of_batch"), {"id": _owner(key)}).fetchone()
        write_receipt(
            connection,
            backends.receipt_key,
            kind="orphan",
            object_id=key,
            project_id=batch["project_id"] if batch else None,
            actor=RETENTION,
            reason="it belonged to no file, batch or job",
            versions=versions,
            **content,
        )
    logger.info("orphan.deleted", key=key, size_bytes=size_bytes)
    backends.metrics.removals.labels(object="orphan").inc()


def _measure(chunks: Iterable[bytes]) -> tuple[int, bytes]:
    digest, size_bytes = hashlib.sha256(), 0
    for chunk in chunks:
        digest.update(chunk)
        size_bytes += len(chunk)
    return size_bytes, digest.digest()
