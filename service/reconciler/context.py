"""What every step of the reconciler works with."""

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Event

from service.db import Pool
from service.model_catalogue import Catalogue
from service.ports import Launcher, ObjectStore
from service.reconciler.metrics import Metrics
from service.workspace import Workspace


@dataclass(slots=True)
class Pulse:
    """Signs of life of the loop: ``beat_at`` in monotonic seconds, and whether it leads or waits for another."""

    beat_at: float = field(default_factory=time.monotonic)
    is_leading: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The ports and settings of a reconciler.

    Attributes:
        pool: Postgres.
        store: input files, parts, output files.
        launcher: runs jobs.
        catalogue: the models.
        job_database_url: what jobs are given to report progress; empty for none.
        workspace: where results are put together, with room for those of the largest batches.
        max_running_jobs: more jobs than this are not launched; projects take turns. On a Ray that is too small for
            all of them, jobs that hold a part of what they need would block each other for ever.
        retention_s: how long batches that have ended and their files are kept where nothing else says so.
        first_pause_s: from a step that failed until it is tried again; doubled each time, up to half a minute.
        metrics: what is counted and measured.
        pulse: the loop's signs of life.
        stopping: set when the process is to end; a step is finished, none is begun.
    """

    pool: Pool
    store: ObjectStore
    launcher: Launcher
    catalogue: Catalogue
    job_database_url: str
    workspace: Workspace
    max_running_jobs: int = 2
    retention_s: int = 30 * 24 * 3600
    first_pause_s: float = 1.0
    metrics: Metrics = field(default_factory=Metrics)
    pulse: Pulse = field(default_factory=Pulse)
    stopping: Event = field(default_factory=Event)


def utc_now() -> datetime:
    """The time now, aware, in UTC."""
    return datetime.now(UTC)
