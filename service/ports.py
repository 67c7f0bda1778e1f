"""The two ports of the service. Each has real implementations in ``service.adapters`` and an in-memory fake."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from ray_job.contract.job_spec import JobSpec, ModelSpec, ObjectStoreLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """Size in bytes and SHA-256 digest of an object that was written."""

    size_bytes: int
    sha256: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedObject:
    """Key of an object in a listing, and the aware time of its last change."""

    key: str
    modified_at: datetime


class ObjectStore(Protocol):
    """Objects by key. Safe to use from several threads.

    Every method raises ``ObjectStoreError`` if the store is unreachable, and ``ObjectNotFoundError`` if a key does not
    exist (both in ``service.errors``).
    """

    def put(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        """Write an object from a stream, completely or not at all. Replace an existing one."""
        ...

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        """Stream an object from byte ``start``, in chunks of at most 1 MiB."""
        ...

    def keys(self, prefix: str) -> Iterator[str]:
        """Yield every key that starts with ``prefix``, in lexical order."""
        ...

    def objects(self, prefix: str, *, after: str = "") -> Iterator[ListedObject]:
        """Yield every object whose key starts with ``prefix`` and comes after ``after``, in lexical order.

        A bucket with versioning also yields the keys of which only hidden versions are left. Memory does not grow with
        the number of objects.
        """
        ...

    def delete(self, key: str) -> tuple[str, ...]:
        """Delete an object with all of its versions. A missing key is not an error.

        Returns:
            The ids of the deleted versions; none if the store keeps no versions.

        Raises:
            ObjectVersionsError: the store keeps a version that it does not let the service delete.
        """
        ...

    def abort_uploads(self, prefix: str, *, before: datetime) -> int:
        """Delete what uploads that began before a time and never ended have left. Return their number."""
        ...

    def location(self) -> ObjectStoreLocation:
        """Return the location from which a Ray job reaches the same objects."""
        ...

    def read_url(self, key: str, *, expires_s: int) -> str:
        """Return a URL at which one object can be read until it expires, without credentials.

        It is ``file:///…`` for a directory, which does not expire. The object need not exist.
        """
        ...

    def write_url(self, key: str, *, expires_s: int) -> str:
        """Return a URL at which one object can be written once or more until it expires, by a PUT on S3."""
        ...

    def check(self) -> None:
        """Raise ObjectStoreError unless the store answers, and lets the service delete every version of an object."""
        ...


class JobState(StrEnum):
    """States of a job. ``missing``: the launcher does not know the job, or no longer does."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """State of a job, with the reason if it failed or waits.

    Attributes:
        state: the state.
        message: the reason; empty if there is none.
        is_stuck: the job waits for something that time alone cannot fix, such as an image that does not exist.
        is_working: False for a running job whose workers still wait for their nodes.
        is_final: the job failed, and would fail again unchanged, for example because its model is missing.
    """

    state: JobState
    message: str = ""
    is_stuck: bool = False
    is_working: bool = True
    is_final: bool = False


class Launcher(Protocol):
    """Runs ``ray_job`` with a job spec. Every method raises ``LauncherError`` if Ray is unreachable."""

    def refusal(self, model: ModelSpec) -> str:
        """Return why no job of a model can run here, and what to do. Empty if one can, or if that is unknown."""
        ...

    def launch(self, spec: JobSpec, token: str) -> None:
        """Start a job. Launching the same ``spec.job_id`` again starts no second one.

        Args:
            spec: the job.
            token: its token, which only its driver may read.

        Raises:
            LaunchRefusedError: the job is refused as it is.
        """
        ...

    def status(self, job_id: str) -> JobStatus:
        """Return the current state of a job."""
        ...

    def stop(self, job_id: str) -> None:
        """Ask a job to end. A job that has ended or never existed is not an error."""
        ...
