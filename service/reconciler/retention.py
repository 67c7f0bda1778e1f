"""Deletes what is too old: files that expired or were deleted while a batch read them, and batches that ended long ago.

Each deletion leaves a row in the audit log, in the transaction that deletes. A file's object goes before its row is
gone for good, so a row tells of everything that still has to be deleted; doing it twice is harmless.
"""

from threading import Event
from typing import Final

import psycopg
import structlog

from ray_job.contract.object_keys import file_key
from service.db import query
from service.errors import ObjectStoreError
from service.reconciler.context import Context

logger = structlog.get_logger(__name__)

SWEEP_INTERVAL_S: Final = 60.0
ACTOR: Final = "retention"
# Rows per statement: locks are short, and a stop is noticed soon.
_CHUNK: Final = 100


def keep_sweeping(context: Context, over: Event) -> None:
    """Sweeps every minute until ``over`` is set."""
    while not over.is_set():
        try:
            sweep(context, over)
        except Exception as error:  # noqa: BLE001 - the shell of a thread: what failed is tried again a minute later
            is_transient = isinstance(error, psycopg.OperationalError)
            (logger.warning if is_transient else logger.exception)("retention.sweep_failed", error=str(error))
        over.wait(SWEEP_INTERVAL_S)


def sweep(context: Context, over: Event) -> None:
    """Deletes all that is too old now. A file that the store does not let go of is left for the next sweep.

    Raises:
        psycopg.OperationalError: Postgres cannot be reached; what was not deleted is left for the next sweep.
    """
    _sweep_files(context, over)
    _sweep_batches(context, over)
    with context.pool.connection() as connection:
        connection.execute(query("remove_old_deliveries"), {"limit": _CHUNK * _CHUNK})


def _sweep_files(context: Context, over: Event) -> None:
    failed: list[str] = []
    while not over.is_set():
        with context.pool.connection() as connection:
            rows = connection.execute(query("files_to_remove"), {"failed": failed, "limit": _CHUNK}).fetchall()
        for row in rows:
            if over.is_set():
                return
            if not _remove_file(context, row["id"]):
                failed.append(row["id"])
        # A store that refuses a whole chunk refuses the next one too.
        if len(rows) < _CHUNK or len(failed) >= _CHUNK:
            return


def _remove_file(context: Context, file_id: str) -> bool:
    with context.pool.connection() as connection:
        row = connection.execute(query("lock_file_to_remove"), {"id": file_id}).fetchone()
        if row is None:
            return False
        use = connection.execute(query("file_is_in_use"), {"id": file_id, "project_id": row["project_id"]}).fetchone()
        if use is None or use["in_use"]:
            return False
        try:
            context.store.delete(file_key(file_id))
        except ObjectStoreError as error:
            logger.warning("retention.store_refused", file_id=file_id, error=str(error))
            return False
        reason = "expired" if row["deleted_by"] is None else f"deleted by {row['deleted_by']} while a batch read it"
        connection.execute(query("remove_file"), {"id": file_id, "actor": ACTOR, "reason": reason})
    logger.info("file.deleted", file_id=file_id, actor=ACTOR)
    context.metrics.removals.labels(object="file").inc()
    return True


def _sweep_batches(context: Context, over: Event) -> None:
    values = {"retention_s": context.retention_s, "limit": _CHUNK}
    while not over.is_set():
        with context.pool.connection() as connection:
            ids = [row["id"] for row in connection.execute(query("batches_to_remove"), values)]
            removed = connection.execute(query("remove_batches"), {"ids": ids}).fetchall() if ids else []
        for row in removed:
            logger.info("batch.deleted", batch_id=row["id"], actor=ACTOR)
        context.metrics.removals.labels(object="batch").inc(len(removed))
        if len(removed) < _CHUNK:
            return
