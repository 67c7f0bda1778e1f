"""Erasure of projects: everything in a project is deleted, and last the project itself.

``service.projects.erase_project`` archives a project and marks it. From then on its batches are cancelled, its files
have expired and its batches are kept no longer than their leftovers. When nothing is left, the rest goes in one
transaction. The state is in the database, so another process can go on at any point.
"""

from threading import Event

import structlog

from service.audit.log import OPERATOR, record_action
from service.db import Pool, query
from service.receipts import write_receipt
from service.reconciler.backends import Backends

logger = structlog.get_logger(__name__)

REASON = "the project was erased"


def stop_work(pool: Pool) -> None:
    """Cancel the batches of projects that are being erased, end their jobs, and let their files expire."""
    for name in ("cancel_erased_batches", "drain_erased_jobs", "expire_erased_files"):
        with pool.connection() as connection:
            connection.execute(query(name))


def finish_erasures(backends: Backends, over: Event) -> None:
    """Delete the projects that are being erased and have no file, no batch and no running job left.

    The audit log and the receipts stay, and what the projects used remains in the totals of the stack.
    """
    while not over.is_set():
        with backends.pool.connection() as connection:
            # The lock keeps out uploads that authenticated before the erasure.
            row = connection.execute(query("lock_erased_project")).fetchone()
            if row is None:
                return
            values = {"id": row["id"]}
            domains = connection.execute(query("domains_of_project"), values).fetchall()
            for name in (
                "keep_totals_of_project",
                "remove_totals_of_project",
                "keep_usage_of_project",
                "remove_endpoints_of_project",
                "remove_refusals_of_project",
                "remove_keys_of_project",
                "release_shared_jobs_of_project",
                "remove_jobs_of_project",
                "remove_turns_of_project",
            ):
                connection.execute(query(name), values)
            for domain in domains:
                connection.execute(query("remove_domain"), domain)
            connection.execute(query("remove_project"), values)
            ids = {"project_id": row["id"], "object_id": row["id"]}
            record_action(connection, "project.deleted", actor=OPERATOR, **ids)
            write_receipt(
                connection,
                backends.receipt_key,
                kind="project",
                actor=OPERATOR,
                reason=REASON,
                **ids,
            )
        logger.info("project.deleted", project_id=row["id"])
        backends.metrics.removals.labels(object="project").inc()
