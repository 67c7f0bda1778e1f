"""What every step of the reconciler works with."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Lock

from service.db import Pool
from service.model_catalogue import Catalogue
from service.ports import Launcher, ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The ports and settings of a reconciler.

    Attributes:
        pool: Postgres.
        store: input files, parts, output files.
        launcher: runs jobs.
        catalogue: the models.
        job_database_url: what jobs are given to report progress; empty for none.
        workspace: a directory on disk for temporary files, as large as the results of the largest batches.
        max_running_jobs: more jobs than this are not launched; the oldest batches come first. On a Ray that is too
            small for all of them, jobs that hold a part of what they need would block each other for ever.
        stopping: set when the process is to end; a step is finished, none is begun.
        launching: held from counting the running jobs until one more is noted.
    """

    pool: Pool
    store: ObjectStore
    launcher: Launcher
    catalogue: Catalogue
    job_database_url: str
    workspace: Path
    max_running_jobs: int = 2
    stopping: Event = field(default_factory=Event)
    launching: Lock = field(default_factory=Lock)


def utc_now() -> datetime:
    """The time now, aware, in UTC."""
    return datetime.now(UTC)
