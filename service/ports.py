"""The two ports of the service. Each has real implementations in ``service.adapters`` and an in-memory fake."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from ray_job.contract.job_spec import JobSpec, ModelSpec, ObjectStoreLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """What was written: its size in bytes and the SHA-256 of its content."""

    size_bytes: int
    sha256: bytes


class ObjectStore(Protocol):
    """Keeps objects by key. Safe to use from several threads at once.

    Every method raises ``ObjectStoreError`` when the store cannot be reached, and
    ``ObjectNotFoundError`` for a key that is not there (both in ``service.errors``).
    """

    def put(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        """Writes an object from a stream, whole or not at all; replaces an older one."""
        ...

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        """Streams an object from byte ``start``, in chunks of at most 1 MiB."""
        ...

    def keys(self, prefix: str) -> Iterator[str]:
        """Every key that starts with ``prefix``, in lexical order."""
        ...

    def delete(self, key: str) -> None:
        """Deletes an object; a key that is not there is no error."""
        ...

    def location(self) -> ObjectStoreLocation:
        """How a Ray job reaches the same objects."""
        ...

    def check(self) -> None:
        """Raises ObjectStoreError unless the store answers."""
        ...


class JobState(StrEnum):
    """The states of a job; ``missing``: the launcher knows no such job (any more)."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A job's state and, where it failed or waits, the reason in words.

    Attributes:
        state: its state.
        message: the reason in words; empty where there is none.
        is_stuck: it waits for what waiting does not bring, such as an image that is not there.
        is_working: of one that runs: False while its workers still wait for their nodes.
        is_final: of one that failed: the same job would fail again, as where its model is not in the object store.
    """

    state: JobState
    message: str = ""
    is_stuck: bool = False
    is_working: bool = True
    is_final: bool = False


class Launcher(Protocol):
    """Runs ``ray_job`` with a job spec. Every method raises ``LauncherError`` when Ray cannot be reached."""

    def refusal(self, model: ModelSpec) -> str:
        """Why no job of a model can ever run here, and what to do; empty where one can, or nobody knows."""
        ...

    def launch(self, spec: JobSpec) -> None:
        """Starts a job; launching the same ``spec.job_id`` again changes nothing.

        Raises:
            LaunchRefusedError: it is refused as it is.
        """
        ...

    def status(self, job_id: str) -> JobStatus:
        """The job's state now."""
        ...

    def stop(self, job_id: str) -> None:
        """Asks a job to end; a job that ended or never was is no error."""
        ...
