"""Runs each job as a RayJob of KubeRay: one Ray cluster for each batch, made for it and gone after it.

A RayJob's name is made of the job's id, and the API server takes a name once. So there is never a second RayJob for
an attempt, however often it is launched and whenever this process dies.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from threading import Lock
from types import TracebackType
from typing import Final, Self

import structlog

from ray_job.contract.job_spec import JobSpec, ModelSpec
from ray_job.contract.rayjobs import RayJobNameError, rayjob_name
from service.adapters.rayjob_status import Place, RayJobView, job_status, place_of, view_of, waiting_pods
from service.adapters.rayjob_templates import Template, rayjob
from service.adapters.rayjob_watch import RayJobWatch
from service.adapters.rayjobs_api import RayJobsApi
from service.errors import LauncherError
from service.ports import JobState, JobStatus

logger = structlog.get_logger(__name__)

# Waiting pods are looked at no more often, however many jobs there are.
WAITING_INTERVAL_S: Final = 10.0
# KubeRay deletes what has ended when its time is over, except RayJobs that it refused or that were stopped from
# outside. Those are deleted from here, somewhat later.
_GRACE: Final = timedelta(minutes=1)


class KubeRayLauncher:
    """Launches ``ray_job`` as RayJobs. Use it as a context manager.

    Args:
        api: the namespace of the jobs.
        templates: the RayJob of each model, by the model's id.
    """

    def __init__(self, api: RayJobsApi, templates: Mapping[str, Template]) -> None:
        self._api = api
        self._templates = templates
        self._watch = RayJobWatch(api, tidy=self._tidy)
        self._lock = Lock()
        self._waiting: dict[str, str] = {}
        self._waiting_until = 0.0
        # The last that was seen of a cluster that waited: a failed one's pods may be gone.
        self._waited: dict[str, str] = {}
        # Groups with too few pods that run, and for how many seconds one may be stuck there (None: the RayJob says it):
        # since when one is (monotonic seconds), and why.
        self._stuck: dict[tuple[Place, int | None], tuple[float, str]] = {}
        # Groups of which a pod had a node when last seen; None before pods could be listed.
        self._placed: set[Place] | None = None
        self._is_blind = False
        # Whether a job runs of which no pod with GPUs was seen on a node.
        self._is_asked = False

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.close()

    def refusal(self, model: ModelSpec) -> str:
        """See ``service.ports.Launcher.refusal``."""
        if model.id in self._templates:
            return ""
        return (
            f"there is no RayJob for it, which takes a node pool for its accelerator, {model.accelerator}; "
            "the operator of this stack adds that pool and deploys again"
        )

    def launch(self, spec: JobSpec) -> None:
        """See ``service.ports.Launcher.launch``."""
        template = self._templates.get(spec.model.id)
        if template is None:
            raise LauncherError(f"cannot launch {spec.job_id}: {spec.model.id}: {self.refusal(spec.model)}")
        name = _name(spec.job_id)
        self._watch.expect(name)
        if not self._api.create(rayjob(template, spec)):
            logger.info("rayjob.exists", job_id=spec.job_id)

    def status(self, job_id: str) -> JobStatus:
        """See ``service.ports.Launcher.status``."""
        view = self._view(_name(job_id))
        if view is None:
            return JobStatus(state=JobState.MISSING)
        waiting = self._why_waiting(view)
        if view.is_over:
            return job_status(view, waiting)
        stuck = self._why_stuck(view)
        return job_status(view, stuck or waiting, is_stuck=bool(stuck), is_working=self._is_working(view))

    def stop(self, job_id: str) -> None:
        """See ``service.ports.Launcher.stop``. The RayJob is gone, and the job missing, once all its pods are."""
        name = _name(job_id)
        view = self._view(name)
        if view is None or view.is_over or view.is_deleting:
            return
        self._api.delete(name)
        self._watch.forget(name)

    def _view(self, name: str) -> RayJobView | None:
        if (known := self._watch.view(name)) is not None:
            return known
        found = self._api.get(name)
        if found is None:
            self._watch.note_gone(name)
            return None
        view = view_of(found)
        self._watch.note(view)
        return view

    def _why_waiting(self, view: RayJobView) -> str:
        """Why the job's pods wait, or waited; told in the log whenever it changes."""
        if not view.cluster or (view.is_over and view.deployment != "Failed"):
            return ""
        with self._lock:
            is_due = time.monotonic() >= self._waiting_until
            if is_due:
                self._waiting_until = time.monotonic() + WAITING_INTERVAL_S
        if is_due:
            self._look_at_pods()
        with self._lock:
            why = self._waiting.get(view.cluster, "")
            if why and why != self._waited.get(view.cluster):
                logger.warning("rayjob.waiting", rayjob=view.name, reason=why)
                self._waited[view.cluster] = why
            return why or (self._waited.get(view.cluster, "") if view.is_over else "")

    def _why_stuck(self, view: RayJobView) -> str:
        """Why a group of the job's pods has been stuck for too long; empty when none has."""
        now = time.monotonic()
        with self._lock:
            for ((cluster, _), limit_s), (since, why) in self._stuck.items():
                limit = view.stuck_limit_s if limit_s is None else limit_s
                if cluster == view.cluster and now - since >= limit:
                    return why
        return ""

    def _is_working(self, view: RayJobView) -> bool:
        """Whether a pod with GPUs has a node; also where the job needs none (yet), and where no pod can be listed."""
        if view.deployment != "Running" or not view.gpu_groups:
            return True
        with self._lock:
            if self._placed is None:
                is_working = self._is_blind
            else:
                is_working = any((view.cluster, group) in self._placed for group in view.gpu_groups)
            self._is_asked = self._is_asked or not is_working
        return is_working

    def _look_at_pods(self) -> None:
        is_asked = self._is_asked
        try:
            pending = self._api.pods("Pending")
            waiting = waiting_pods(pending, datetime.now(UTC))
            stuck = [each for each in waiting if each.is_stuck]
            running = self._api.pods("Running") if stuck or is_asked else []
        except LauncherError as error:
            # Only the reason is lost; the state of the jobs is known without the pods.
            logger.warning("rayjob.pods_unknown", error=str(error))
            self._is_blind = True
            return
        now = time.monotonic()
        at_work = Counter(map(place_of, running))
        with self._lock:
            self._waiting = {each.place[0]: each.why for each in reversed(waiting)}
            # Where an engine's worth of a group runs, the job gets on without the one.
            self._stuck = {
                (each.place, each.limit_s): (self._stuck.get((each.place, each.limit_s), (now, ""))[0], each.why)
                for each in stuck
                if at_work[each.place] < each.hosts
            }
            self._is_blind = False
            if is_asked:
                self._placed = {place_of(pod) for pod in (*pending, *running) if pod["spec"].get("nodeName")}
                self._is_asked = False

    def _tidy(self, views: Iterable[RayJobView]) -> None:
        """Deletes RayJobs whose time is over, and forgets why clusters waited that are no more."""
        known = list(views)
        now = datetime.now(UTC)
        for view in known:
            kept = timedelta(seconds=view.keep_s) + _GRACE
            if view.ended_at is not None and not view.is_deleting and now > view.ended_at + kept:
                self._api.delete(view.name)
                logger.info("rayjob.deleted", rayjob=view.name, reason="it ended long ago")
        clusters = {view.cluster for view in known}
        with self._lock:
            self._waited = {cluster: why for cluster, why in self._waited.items() if cluster in clusters}


def _name(job_id: str) -> str:
    try:
        return rayjob_name(job_id)
    except RayJobNameError as error:
        raise LauncherError(str(error)) from error
