"""Deletion by age: files that expired or were deleted while a batch read them, and batches that ended long ago.

Objects that a job wrote for a batch after its end are deleted an hour later: a job that has lost its leases without
noticing it holds URLs that are still valid.

Each deletion of a file or batch adds a row to the audit log and a receipt, in the same transaction. The object of a
file is deleted before its row, so the row exists as long as something is left to delete; deleting an object twice is
harmless. Projects that are erased are kept no longer at all: see ``service.reconciler.erasure``.
"""

from threading import Event
from typing import Final

import structlog

from ray_job.contract.object_keys import batch_prefix, file_key
from service.audit.log import OPERATOR, RETENTION
from service.db import query
from service.errors import ObjectStoreError
from service.receipts import remove_file, write_receipt
from service.reconciler.backends import Backends
from service.reconciler.erasure import REASON, finish_erasures, stop_work
from service.reconciler.repeating import repeat

logger = structlog.get_logger(__name__)

SWEEP_INTERVAL_S: Final = 60.0
# Rows per statement. Locks stay short, and a stop is noticed soon.
_CHUNK: Final = 100


def keep_sweeping(backends: Backends, over: Event) -> None:
    """Sweep every minute until ``over`` is set."""
    repeat(lambda: sweep(backends, over), over, interval_s=SWEEP_INTERVAL_S, failure="retention.sweep_failed")


def sweep(backends: Backends, over: Event) -> None:
    """Delete everything that is past its retention. A file that the store fails to delete waits for the next sweep.

    A retention that was lowered also applies to the files that exist.

    Raises:
        psycopg.OperationalError: Postgres cannot be reached; the next sweep deletes the rest.
    """
    with backends.pool.connection() as connection:
        connection.execute(query("shorten_expiries"), {"retention_s": backends.retention_s})
    stop_work(backends.pool)
    failed: list[str] = []
    while not over.is_set():
        with backends.pool.connection() as connection:
            rows = connection.execute(query("files_to_remove"), {"failed": failed, "limit": _CHUNK}).fetchall()
        for row in rows:
            if over.is_set():
                break
            if not _remove_file(backends, row["id"]):
                failed.append(row["id"])
        # A store that fails for a whole chunk would fail for the next one too.
        if len(rows) < _CHUNK or len(failed) >= _CHUNK:
            break
    _delete_leftovers(backends, over)
    _remove_batches(backends, over)
    finish_erasures(backends, over)
    with backends.pool.connection() as connection:
        connection.execute(query("remove_old_deliveries"), {"limit": _CHUNK * _CHUNK})
        connection.execute(query("remove_old_usage"), {"days": backends.usage_retention_days})


def _remove_batches(backends: Backends, over: Event) -> None:
    values = {"retention_s": backends.retention_s, "limit": _CHUNK}
    while not over.is_set():
        with backends.pool.connection() as connection:
            rows = connection.execute(query("batches_to_remove"), values).fetchall()
            for is_erased in (False, True):
                ids = [row["id"] for row in rows if row["is_erased"] is is_erased]
                actor, reason = (OPERATOR, REASON) if is_erased else (RETENTION, "expired")
                removed = connection.execute(query("remove_batches"), {"ids": ids, **actor.values()}).fetchall()
                for row in removed:
                    ids_of_row = {"object_id": row["id"], "project_id": row["project_id"]}
                    write_receipt(
                        connection, backends.receipt_key, kind="batch", actor=actor, reason=reason, **ids_of_row
                    )
        for row in rows:
            logger.info("batch.deleted", batch_id=row["id"])
        backends.metrics.removals.labels(object="batch").inc(len(rows))
        if len(rows) < _CHUNK:
            break


def _delete_leftovers(backends: Backends, over: Event) -> None:
    failed: list[str] = []
    while not over.is_set():
        with backends.pool.connection() as connection:
            values = {"failed": failed, "limit": _CHUNK}
            ids = [row["id"] for row in connection.execute(query("batches_with_leftovers"), values)]
        for batch_id in ids:
            if over.is_set():
                break
            try:
                for key in list(backends.store.keys(batch_prefix(batch_id))):
                    backends.store.delete(key)
            except ObjectStoreError as error:
                logger.warning("retention.store_refused", batch_id=batch_id, error=str(error))
                failed.append(batch_id)
                continue
            with backends.pool.connection() as connection:
                connection.execute(query("record_leftovers_deleted"), {"id": batch_id})
        # A store that fails for a whole chunk would fail for the next one too.
        if len(ids) < _CHUNK or len(failed) >= _CHUNK:
            break


def _remove_file(backends: Backends, file_id: str) -> bool:
    """Delete a file's object and row; return False if it is in use, or the store fails."""
    with backends.pool.connection() as connection:
        row = connection.execute(query("lock_file_to_remove"), {"id": file_id}).fetchone()
        if row is None:
            return False
        use = connection.execute(query("file_is_in_use"), {"id": file_id, "project_id": row["project_id"]}).fetchone()
        if use is None or use["in_use"]:
            return False
        try:
            versions = backends.store.delete(file_key(file_id))
        except ObjectStoreError as error:
            logger.warning("retention.store_refused", file_id=file_id, error=str(error))
            return False
        actor, client = (OPERATOR if row["is_erased"] else RETENTION), row["deleted_by"]
        reason = REASON if row["is_erased"] else "expired"
        if client is not None:
            reason = f"deleted by {client} while a batch read it"
        remove_file(
            connection,
            backends.receipt_key,
            file_id=file_id,
            actor=actor,
            reason=reason,
            versions=versions,
            on_behalf_of=client or "",
        )
    logger.info("file.deleted", file_id=file_id, actor=actor.id)
    backends.metrics.removals.labels(object="file").inc()
    return True
