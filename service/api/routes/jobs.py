"""``GET /v1/jobs``: the jobs that run batches of a project, for people who watch them."""

from typing import Literal, Self

from fastapi import APIRouter

from service.api.dependencies import BackendsDependency, QueuePositionsDependency, ReadAccess
from service.api.openapi import WITH_KEY
from service.api.schemas import Answer, unix_seconds
from service.db.rows import JobRow, fetch_all

router = APIRouter(prefix="/v1/jobs", tags=["Jobs"], responses=WITH_KEY)


class JobObject(Answer):
    """A job: one run of engines that serves a model. An unknown value is null."""

    id: str
    object: Literal["job"]
    model: str
    """The `id` of the model."""
    status: str
    """`queued` until it has a slot, `starting` until an engine is ready, `working`, `warm` without work, `draining`
    when it takes no more work, `ending`."""
    queue_position: int | None
    """1 is launched next; null unless the job is queued."""
    accelerator: str
    """What its engines run on."""
    gpus: int
    """GPUs that it may reserve."""
    engines: int
    """Engines that are ready."""
    leased_segments: int
    """Segments of the project that it holds."""
    leased_batches: int
    """Batches of these segments."""
    oldest_lease_seconds: float | None
    """The age of the oldest lease of these segments; null if there are none."""
    segments_left: int
    """Segments of all batches of the project that it can run, with those that it holds."""
    rate_rows_per_second: float
    """Finished requests per second of these batches, over about the last minute."""
    created_at: int
    launched_at: int | None
    idle_since: int | None
    """Since when it holds no lease; null while it does."""
    last_seen_at: int | None
    """Its last request to the coordinator."""

    @classmethod
    def from_row(cls, row: JobRow, *, queue_position: int | None) -> Self:
        """Return the job of a row."""
        return cls(
            id=row.id,
            object="job",
            model=row.model,
            status=row.status,
            queue_position=queue_position,
            accelerator=row.accelerator,
            gpus=row.gpus,
            engines=row.engines,
            leased_segments=row.segments,
            leased_batches=row.batches,
            oldest_lease_seconds=None if row.lease_age_s is None else round(row.lease_age_s, 1),
            segments_left=row.segments_left,
            rate_rows_per_second=round(row.rows_per_s, 3),
            created_at=int(row.created_at.timestamp()),
            launched_at=unix_seconds(row.launched_at),
            idle_since=unix_seconds(row.idle_since),
            last_seen_at=unix_seconds(row.seen_at),
        )


class JobList(Answer):
    """All jobs, the oldest first."""

    object: Literal["list"] = "list"
    data: list[JobObject]


@router.get(
    "",
    operation_id="listJobs",
    summary="List the jobs",
    description="List the jobs that can run batches of the project of the API key, except those that are gone. Other "
    "projects may share them: state, queue position and engines are those of the job, but what it holds and its rate "
    "count the batches of the project only.",
)
def list_jobs(backends: BackendsDependency, positions: QueuePositionsDependency, access: ReadAccess) -> JobList:
    """List the jobs that can run batches of a project."""
    with backends.pool.connection() as connection:
        rows = fetch_all(connection, JobRow, "jobs_of_project", {"project_id": access.project.id})
    queue = positions.now() if any(row.status == "queued" for row in rows) else {}
    return JobList(data=[JobObject.from_row(row, queue_position=queue.get(row.id)) for row in rows])
