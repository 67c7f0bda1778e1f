"""The object store and the launcher in memory, with calls that fail before or after they took effect."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from ray_job.contract.job_spec import JobSpec, ModelSpec
from service.adapters.memory_launcher import MemoryLauncher
from service.adapters.memory_object_store import MemoryObjectStore
from service.errors import LauncherError, LaunchRefusedError, ObjectStoreError
from service.ports import JobState, JobStatus, StoredObject
from tests.simulation.scheduler import Scheduler

RUNNING = JobStatus(state=JobState.RUNNING)


class SimulatedStore(MemoryObjectStore):
    """An object store whose calls fail at times."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def _check(self, call: str) -> bool:
        """Interrupt a call. Return whether it fails after its effect; raise if it fails before."""
        self._scheduler.interrupt(self._scheduler.rates.between)
        if not self._scheduler.happens(self._scheduler.rates.store):
            return False
        is_late = self._scheduler.happens(0.5)
        self._scheduler.note("store", call, "fails", "late" if is_late else "early")
        if not is_late:
            raise ObjectStoreError(f"simulated: {call} failed before it took effect")
        return True

    def put(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        """See ``service.ports.ObjectStore.put``."""
        is_late = self._check("put")
        stored = super().put(key, chunks)
        if is_late:
            raise ObjectStoreError("simulated: put failed after it took effect")
        return stored

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        """See ``service.ports.ObjectStore.read``."""
        is_late = self._check("read")
        yield from super().read(key, start=start)
        if is_late:
            raise ObjectStoreError("simulated: read failed at its end")

    def keys(self, prefix: str) -> Iterator[str]:
        """See ``service.ports.ObjectStore.keys``."""
        self._check("keys")
        return super().keys(prefix)

    def delete(self, key: str) -> tuple[str, ...]:
        """See ``service.ports.ObjectStore.delete``."""
        is_late = self._check("delete")
        deleted = super().delete(key)
        if is_late:
            raise ObjectStoreError("simulated: delete failed after it took effect")
        return deleted

    def look(self, key: str) -> bytes | None:
        """Return an object without faults; None if there is none."""
        return self._objects.get(key)

    def all_keys(self, prefix: str) -> list[str]:
        """Return the keys with a prefix without faults."""
        return sorted(key for key in self._objects if key.startswith(prefix))


class SimulatedLauncher(MemoryLauncher):
    """A launcher whose calls fail at times, and that reports the ends of jobs late.

    Args:
        scheduler: decides which calls fail.
        start: starts the driver of a job.
        kill: ends the driver of a job, unless it outlives that.
    """

    def __init__(
        self, scheduler: Scheduler, start: Callable[[JobSpec, str], None], kill: Callable[[str], None]
    ) -> None:
        super().__init__(lambda _: JobStatus(state=JobState.PENDING))
        self._scheduler = scheduler
        self._start = start
        self._kill = kill
        self._due: dict[str, tuple[datetime, JobStatus]] = {}

    def refusal(self, model: ModelSpec) -> str:
        """See ``service.ports.Launcher.refusal``."""
        with self._faults("refusal"):
            return super().refusal(model)

    def launch(self, spec: JobSpec, token: str) -> None:
        """See ``service.ports.Launcher.launch``."""
        if self._scheduler.happens(self._scheduler.rates.launcher / 4):
            self._scheduler.note("launch refused", spec.job_id)
            raise LaunchRefusedError("simulated: the job is refused as it is")
        with self._faults("launch"):
            if spec.job_id not in self._jobs:
                super().launch(spec, token)
                self._start(spec, token)

    def status(self, job_id: str) -> JobStatus:
        """See ``service.ports.Launcher.status``."""
        with self._faults("status"):
            self.settle(job_id)
            return super().status(job_id)

    def stop(self, job_id: str) -> None:
        """See ``service.ports.Launcher.stop``."""
        with self._faults("stop"):
            if job_id in self._jobs and self._jobs[job_id].state in {JobState.PENDING, JobState.RUNNING}:
                self.end_later(job_id, JobStatus(state=JobState.STOPPED))
                self._kill(job_id)

    def end_later(self, job_id: str, status: JobStatus) -> None:
        """Let a job end. It may be reported later."""
        delay_s = self._scheduler.random.choice((0, 0, 0.5, 20, 400))
        self._due.setdefault(job_id, (self._scheduler.now + timedelta(seconds=delay_s), status))
        self.settle(job_id)

    def run(self, job_id: str) -> None:
        """Report a pending job as running."""
        if job_id in self._jobs and self._jobs[job_id].state is JobState.PENDING:
            self.end(job_id, RUNNING)

    def forget_one(self, job_id: str) -> None:
        """Forget a job, like a Ray whose head was restarted."""
        self._jobs.pop(job_id, None)
        self._due.pop(job_id, None)

    def settle(self, job_id: str) -> None:
        """Report the end of a job if its time has come."""
        due = self._due.get(job_id)
        if due is not None and due[0] <= self._scheduler.now and job_id in self._jobs:
            self.end(job_id, due[1])

    def alive(self) -> list[str]:
        """Return the jobs that hold a slot by the launcher's own account."""
        alive = {JobState.PENDING, JobState.RUNNING}
        return [job_id for job_id, status in self._jobs.items() if status.state in alive]

    @contextmanager
    def _faults(self, call: str) -> Iterator[None]:
        scheduler = self._scheduler
        scheduler.interrupt(scheduler.rates.between)
        fails = scheduler.happens(scheduler.rates.launcher)
        is_late = fails and scheduler.happens(0.5)
        if fails:
            scheduler.note("launcher", call, "fails", "late" if is_late else "early")
        if fails and not is_late:
            raise LauncherError(f"simulated: {call} failed before it took effect")
        yield
        if is_late:
            raise LauncherError(f"simulated: {call} failed after it took effect")
        scheduler.interrupt(0.0)
