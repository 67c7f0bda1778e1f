"""A launcher in memory, for tests: each job is a function of its spec."""

from collections.abc import Callable
from threading import Lock

from ray_job.contract.job_spec import JobSpec, ModelSpec
from service.errors import LauncherError
from service.ports import JobState, JobStatus

Work = Callable[[JobSpec], JobStatus]
_OVER = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED})


class MemoryLauncher:
    """Runs each job when it is launched.

    Args:
        work: does the work of a job and returns its state. By default, jobs keep running.

    Attributes:
        launched: the specs of all jobs, in the order of their launch.
        tokens: the token of each job, by its id.
        is_reachable: set it to False to make every call fail.
        refusals: why jobs of a model are refused, by the model's id.
    """

    def __init__(self, work: Work = lambda _: JobStatus(state=JobState.RUNNING)) -> None:
        self.launched: list[JobSpec] = []
        self.tokens: dict[str, str] = {}
        self.is_reachable = True
        self.refusals: dict[str, str] = {}
        self._work = work
        self._jobs: dict[str, JobStatus] = {}
        self._lock = Lock()

    def refusal(self, model: ModelSpec) -> str:
        """See ``service.ports.Launcher.refusal``."""
        self._check()
        return self.refusals.get(model.id, "")

    def launch(self, spec: JobSpec, token: str) -> None:
        """See ``service.ports.Launcher.launch``."""
        self._check()
        with self._lock:
            if spec.job_id in self._jobs:
                return
            self.launched.append(spec)
            self.tokens[spec.job_id] = token
            self._jobs[spec.job_id] = self._work(spec)

    def status(self, job_id: str) -> JobStatus:
        """See ``service.ports.Launcher.status``."""
        self._check()
        with self._lock:
            return self._jobs.get(job_id, JobStatus(state=JobState.MISSING))

    def stop(self, job_id: str) -> None:
        """See ``service.ports.Launcher.stop``."""
        self._check()
        with self._lock:
            job = self._jobs.get(job_id)
            if job is not None and job.state not in _OVER:
                self._jobs[job_id] = JobStatus(state=JobState.STOPPED)

    def end(self, job_id: str, status: JobStatus) -> None:
        """Set the state of a job."""
        with self._lock:
            self._jobs[job_id] = status

    def forget(self) -> None:
        """Forget all jobs, like a Ray whose head was restarted."""
        with self._lock:
            self._jobs.clear()

    def _check(self) -> None:
        if not self.is_reachable:
            raise LauncherError("cannot reach the launcher: a test made it unreachable")
