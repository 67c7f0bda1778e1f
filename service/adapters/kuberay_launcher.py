"""Runs each job as a RayJob of KubeRay, which creates a Ray cluster for the job and deletes it afterwards.

The name of a RayJob is derived from the job's id, and the API server accepts a name once. So a job never has two
RayJobs, however often it is launched and whenever this process dies. Its token is in a Secret of the same name, and a
network policy lets its pods reach each other; the RayJob owns both. The head's pod waits for the Secret, which is
created last, so no container starts without the policy.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from threading import Lock
from types import MappingProxyType, TracebackType
from typing import Final, Self

import structlog

from ray_job.contract.job_spec import JobSpec, ModelSpec
from ray_job.contract.rayjobs import RayJobNameError, rayjob_name
from service.adapters.rayjob_status import Place, RayJobView, job_status, place_of, waiting_pods
from service.adapters.rayjob_templates import Template, network_policy, rayjob, token_secret, with_model
from service.adapters.rayjob_watch import RayJobWatch
from service.adapters.rayjobs_api import RayJobsApi
from service.errors import LauncherError
from service.ports import JobState, JobStatus

logger = structlog.get_logger(__name__)

# The interval between two looks at the pods, for all jobs together.
WAITING_INTERVAL_S: Final = 10.0
# KubeRay deletes ended RayJobs after a time, except those that it refused or that someone else stopped. The launcher
# deletes these somewhat later.
_GRACE: Final = timedelta(minutes=1)


class KubeRayLauncher:
    """Launches ``ray_job`` as RayJobs. Use it as a context manager.

    Args:
        api: the API of the namespace of the jobs.
        templates: the RayJob template of each model of the stack file, by the model's id.
        at_run_time: the RayJob template of models that operators enable, by their accelerator.
    """

    def __init__(
        self,
        api: RayJobsApi,
        templates: Mapping[str, Template],
        *,
        at_run_time: Mapping[str, Template] = MappingProxyType({}),
    ) -> None:
        self._api = api
        self._templates = templates
        self._at_run_time = at_run_time
        self._watch = RayJobWatch(api, tidy=self._tidy)
        self._lock = Lock()
        self._waiting: dict[str, str] = {}
        self._waiting_until = 0.0
        # The last reason of each cluster that waited. The pods of a failed cluster may be gone.
        self._waited: dict[str, str] = {}
        # Groups that lack running pods because one is stuck, with its limit in seconds (None: the RayJob's limit).
        # Values: since when it is stuck, in monotonic seconds, and why.
        self._stuck: dict[tuple[Place, int | None], tuple[float, str]] = {}
        # Groups that had a pod with a node when last seen; None before the first listing.
        self._placed: set[Place] | None = None
        self._listing_failed = False
        # Whether a job runs of which no pod with GPUs was seen on a node, so that nodes must be looked up.
        self._needs_nodes = False

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.close()

    def refusal(self, model: ModelSpec) -> str:
        """See ``service.ports.Launcher.refusal``."""
        if self._template(model) is not None:
            return ""
        return (
            f"it has no RayJob template, because no node pool has its accelerator, {model.accelerator}; "
            "the operator of this stack can add such a pool and deploy again"
        )

    def launch(self, spec: JobSpec, token: str) -> None:
        """See ``service.ports.Launcher.launch``. A repeated launch replaces the token in the job's Secret."""
        template = self._template(spec.model)
        if template is None:
            raise LauncherError(f"cannot launch {spec.job_id}: {spec.model.id}: {self.refusal(spec.model)}")
        name = _rayjob_name(spec.job_id)
        self._watch.expect(name)
        created = self._api.create(rayjob(template, spec, owner=self._api.owner()))
        if created is None:
            logger.info("rayjob.exists", job_id=spec.job_id)
            created = self._api.get(name)
            if created is None:
                raise LauncherError(f"cannot launch {spec.job_id}: its RayJob was deleted meanwhile; launch it again")
        self._api.ensure_network_policy(network_policy(created))
        self._api.put_secret(token_secret(created, token))

    def status(self, job_id: str) -> JobStatus:
        """See ``service.ports.Launcher.status``."""
        view = self._view(_rayjob_name(job_id))
        if view is None:
            return JobStatus(state=JobState.MISSING)
        waiting = self._waiting_reason(view)
        if view.is_over:
            return job_status(view, waiting)
        stuck = self._stuck_reason(view)
        return job_status(view, stuck or waiting, is_stuck=bool(stuck), is_working=self._is_working(view))

    def stop(self, job_id: str) -> None:
        """See ``service.ports.Launcher.stop``. The job is missing once the RayJob and all its pods are deleted."""
        name = _rayjob_name(job_id)
        view = self._view(name)
        if view is None or view.is_over or view.is_deleting:
            return
        self._api.delete(name)
        self._watch.forget(name)

    def _template(self, model: ModelSpec) -> Template | None:
        if template := self._templates.get(model.id):
            return template
        template = self._at_run_time.get(model.accelerator) if model.digest else None
        return None if template is None else with_model(template, model)

    def _view(self, name: str) -> RayJobView | None:
        if (known := self._watch.view(name)) is not None:
            return known
        found = self._api.get(name)
        if found is None:
            self._watch.note_gone(name)
            return None
        view = RayJobView.parse(found)
        self._watch.note(view)
        return view

    def _waiting_reason(self, view: RayJobView) -> str:
        """Return why the job's pods wait, or waited before it failed; log each change."""
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

    def _stuck_reason(self, view: RayJobView) -> str:
        """Return why a group of the job's pods has been stuck for too long; empty if none has."""
        now = time.monotonic()
        with self._lock:
            for ((cluster, _), limit_s), (since, why) in self._stuck.items():
                limit = view.stuck_limit_s if limit_s is None else limit_s
                if cluster == view.cluster and now - since >= limit:
                    return why
        return ""

    def _is_working(self, view: RayJobView) -> bool:
        """Return whether a pod with GPUs has a node; True if the job needs none (yet) or pods cannot be listed."""
        if view.deployment != "Running" or not view.gpu_groups:
            return True
        with self._lock:
            if self._placed is None:
                is_working = self._listing_failed
            else:
                is_working = any((view.cluster, group) in self._placed for group in view.gpu_groups)
            self._needs_nodes = self._needs_nodes or not is_working
        return is_working

    def _look_at_pods(self) -> None:
        needs_nodes = self._needs_nodes
        try:
            pending = self._api.pods("Pending")
            waiting = waiting_pods(pending, datetime.now(UTC))
            stuck = [each for each in waiting if each.is_stuck]
            running = self._api.pods("Running") if stuck or needs_nodes else []
        except LauncherError as error:
            # This loses only the reasons for waiting. The states of the jobs do not depend on the pods.
            logger.warning("rayjob.pods_unknown", error=str(error))
            self._listing_failed = True
            return
        now = time.monotonic()
        at_work = Counter(map(place_of, running))
        with self._lock:
            self._waiting = {each.place[0]: each.why for each in reversed(waiting)}
            # If enough pods of the group run for one engine, the job makes progress without the stuck one.
            self._stuck = {
                (each.place, each.limit_s): (self._stuck.get((each.place, each.limit_s), (now, ""))[0], each.why)
                for each in stuck
                if at_work[each.place] < each.hosts
            }
            self._listing_failed = False
            if needs_nodes:
                self._placed = {place_of(pod) for pod in (*pending, *running) if pod["spec"].get("nodeName")}
                self._needs_nodes = False

    def _tidy(self, views: Iterable[RayJobView]) -> None:
        """Delete RayJobs after their time, and drop the reasons of clusters that no longer exist."""
        known = list(views)
        now = datetime.now(UTC)
        for view in known:
            kept = timedelta(seconds=view.keep_s) + _GRACE
            if view.ended_at is not None and not view.is_deleting and now > view.ended_at + kept:
                self._api.delete(view.name)
                logger.info("rayjob.deleted", rayjob=view.name, reason="its retention is over")
        clusters = {view.cluster for view in known}
        with self._lock:
            self._waited = {cluster: why for cluster, why in self._waited.items() if cluster in clusters}


def _rayjob_name(job_id: str) -> str:
    try:
        return rayjob_name(job_id)
    except RayJobNameError as error:
        raise LauncherError(str(error)) from error
