"""The RayJobs of a namespace, kept current by one watch, so that a hundred running batches cost no requests."""

import time
from collections.abc import Callable, Iterable, Mapping
from threading import Event, Lock, Thread
from typing import Any, Final

import structlog
from kubernetes.watch import Watch

from service.adapters.rayjob_status import RayJobView, version_number, view_of
from service.adapters.rayjobs_api import WATCH_S, ExpiredError, Listing, RayJobsApi
from service.errors import LauncherError

logger = structlog.get_logger(__name__)

MAX_PAUSE_S: Final = 30.0
# Longer than a watch can be behind: one that is silent for longer is taken for dead.
_GONE_S: Final = 2.0 * WATCH_S


class RayJobWatch:
    """Lists once, then follows what changes, in a thread of its own.

    What it knows may be some moments old, so it never says that a RayJob is not there: that only a request can.

    Args:
        api: the namespace.
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
        """Begins to watch; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Ends the watch."""
        self._stopping.set()
        # Stopping a watch that is only being opened does nothing, so it is stopped until it has ended. After a second
        # it is left alone: it is a daemon and keeps nobody waiting.
        for _ in range(20):
            self._watcher.stop()  # type: ignore[no-untyped-call]
            self._thread.join(0.05)
            if not self._thread.is_alive():
                return

    def view(self, name: str) -> RayJobView | None:
        """A RayJob as it was a moment ago; None when it is not known, or not to be trusted."""
        with self._lock:
            return self._views.get(name) if self._is_current else None

    def forget(self, name: str) -> None:
        """Drops a RayJob until the API server tells of it again."""
        with self._lock:
            self._views.pop(name, None)

    def note(self, view: RayJobView) -> None:
        """A RayJob as the API server told it, unless something newer of it is known."""
        with self._lock:
            known = self._views.get(view.name)
            if view.name not in self._gone_until and (known is None or known.version <= view.version):
                self._views[view.name] = view

    def note_gone(self, name: str) -> None:
        """There is no such RayJob any more: whatever a watch or a request still tells of it is older than that."""
        with self._lock:
            self._views.pop(name, None)
            self._gone_until[name] = time.monotonic() + _GONE_S

    def expect(self, name: str) -> None:
        """There will be such a RayJob, whatever was found before."""
        with self._lock:
            self._gone_until.pop(name, None)

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                listing = self._api.list_all()
                self._replace(listing)
                failures = 0
                self._follow(listing.resource_version)
            except ExpiredError:
                continue
            except Exception as error:  # noqa: BLE001 - without this thread every status would cost a request
                failures += 1
                self._lose(error, failures)
                self._stopping.wait(min(2.0 ** min(failures, 10), MAX_PAUSE_S))

    def _follow(self, resource_version: str) -> None:
        while not self._stopping.is_set():
            self._tidy(self._known())
            for kind, rayjob in self._api.watch(self._watcher, resource_version):
                resource_version = rayjob["metadata"]["resourceVersion"]
                self._apply(kind, rayjob)
                if self._stopping.is_set():
                    return

    def _known(self) -> list[RayJobView]:
        now = time.monotonic()
        with self._lock:
            self._gone_until = {name: until for name, until in self._gone_until.items() if until > now}
            return list(self._views.values())

    def _replace(self, listing: Listing) -> None:
        views = {view.name: view for view in map(view_of, listing.items)}
        listed = version_number(listing.resource_version)
        with self._lock:
            newer = {name: view for name, view in self._views.items() if view.version > listed}
            known = {**views, **newer}
            self._views = {name: view for name, view in known.items() if name not in self._gone_until}
            self._is_current = True

    def _apply(self, kind: str, rayjob: Mapping[str, Any]) -> None:
        if kind in ("ADDED", "MODIFIED"):
            self.note(view_of(rayjob))
        elif kind == "DELETED":
            self.note_gone(rayjob["metadata"]["name"])

    def _lose(self, error: Exception, failures: int) -> None:
        with self._lock:
            self._is_current = False
        if not self._stopping.is_set():
            event = logger.warning if isinstance(error, LauncherError) else logger.exception
            event("rayjobs.watch_failed", error=str(error), failures=failures)
