"""The RayJobs of a namespace, kept current by one watch, so that running batches cost no requests."""

import time
from collections.abc import Callable, Iterable, Mapping
from threading import Event, Lock, Thread
from typing import Any, Final

import structlog
from kubernetes.watch import Watch

from service.adapters.rayjob_status import RayJobView, version_number
from service.adapters.rayjobs_api import GONE, WATCH_S, KubernetesApiError, RayJobsApi
from service.errors import LauncherError

logger = structlog.get_logger(__name__)

MAX_PAUSE_S: Final = 30.0
# Longer than a watch can lag behind: one that is silent for longer is closed.
_GONE_S: Final = 2.0 * WATCH_S


class RayJobWatch:
    """Lists the RayJobs once, then follows their changes, in its own thread.

    Its view may lag behind, so it never reports that a RayJob is missing: only a request can find that out.

    Args:
        api: the API of the namespace.
        tidy: called about once a minute with all RayJobs.
    """

    def __init__(self, api: RayJobsApi, *, tidy: Callable[[Iterable[RayJobView]], None]) -> None:
        self._api = api
        self._tidy = tidy
        self._lock = Lock()
        self._views: dict[str, RayJobView] = {}
        self._is_current = False
        self._gone_until: dict[str, float] = {}
        self._stopping = Event()
        self._watcher = Watch()  # type: ignore[no-untyped-call]
        self._thread = Thread(target=self._run, name="rayjobs", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stopping.set()
        # Stopping has no effect while the watch is being opened, so it is repeated until the thread has ended. After a
        # second the thread is left alone: it is a daemon and does not delay the exit.
        for _ in range(20):
            self._watcher.stop()  # type: ignore[no-untyped-call]
            self._thread.join(0.05)
            if not self._thread.is_alive():
                return

    def view(self, name: str) -> RayJobView | None:
        """Return a RayJob as it was a moment ago; None if it is unknown or the watch is not current."""
        with self._lock:
            return self._views.get(name) if self._is_current else None

    def forget(self, name: str) -> None:
        """Drop a RayJob until the API server reports it again."""
        with self._lock:
            self._views.pop(name, None)

    def note(self, view: RayJobView) -> None:
        """Keep a RayJob that the API server returned, unless a newer version is known."""
        with self._lock:
            known = self._views.get(view.name)
            if view.name not in self._gone_until and (known is None or known.version <= view.version):
                self._views[view.name] = view

    def note_gone(self, name: str) -> None:
        """Record that a RayJob no longer exists. What a watch or a request still reports of it is older."""
        with self._lock:
            self._views.pop(name, None)
            self._gone_until[name] = time.monotonic() + _GONE_S

    def expect(self, name: str) -> None:
        """Record that a RayJob is about to be created, even if it was gone before."""
        with self._lock:
            self._gone_until.pop(name, None)

    def apply(self, kind: str, rayjob: Mapping[str, Any]) -> None:
        """Apply a change that the API server reported; see ``RayJobsApi.watch`` for the kinds."""
        if kind in ("ADDED", "MODIFIED"):
            self.note(RayJobView.parse(rayjob))
        elif kind == "DELETED":
            self.note_gone(rayjob["metadata"]["name"])

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                rayjobs, resource_version = self._api.list_all()
                self._replace(rayjobs, resource_version)
                failures = 0
                self._follow(resource_version)
            except Exception as error:  # noqa: BLE001 - without this thread, every status would cost a request
                if isinstance(error, KubernetesApiError) and error.status == GONE:
                    continue  # the watch continued from a version that is too old
                failures += 1
                with self._lock:
                    self._is_current = False
                if not self._stopping.is_set():
                    log = logger.warning if isinstance(error, LauncherError) else logger.exception
                    log("rayjobs.watch_failed", error=str(error), failures=failures)
                self._stopping.wait(min(2.0 ** min(failures, 10), MAX_PAUSE_S))

    def _replace(self, rayjobs: Iterable[Mapping[str, Any]], resource_version: str) -> None:
        """Take over a listing, except RayJobs of which a newer version is known."""
        views = {view.name: view for view in map(RayJobView.parse, rayjobs)}
        listed = version_number(resource_version)
        with self._lock:
            newer = {name: view for name, view in self._views.items() if view.version > listed}
            known = {**views, **newer}
            self._views = {name: view for name, view in known.items() if name not in self._gone_until}
            self._is_current = True

    def _follow(self, resource_version: str) -> None:
        """Apply changes after a version until the watch fails or the thread stops."""
        while not self._stopping.is_set():
            now = time.monotonic()
            with self._lock:
                self._gone_until = {name: until for name, until in self._gone_until.items() if until > now}
                views = list(self._views.values())
            self._tidy(views)
            for kind, rayjob in self._api.watch(self._watcher, resource_version):
                resource_version = rayjob["metadata"]["resourceVersion"]
                self.apply(kind, rayjob)
                if self._stopping.is_set():
                    return
