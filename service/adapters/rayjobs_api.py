"""The few requests to the Kubernetes API that running batches as RayJobs takes, by the official client.

Errors of the client end here: each becomes a ``LauncherError`` that says what was tried and what the API server said.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException, OpenApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError

from ray_job.contract.rayjobs import GROUP, PLURAL, VERSION
from service.errors import LauncherError, LaunchRefusedError, SettingsError

# What the same request is answered again, until somebody changes a role, a template or a policy.
REFUSALS: Final = frozenset({400, 403, 422})
NOT_FOUND: Final = 404
CONFLICT: Final = 409
GONE: Final = 410

# Seconds to connect, and between two reads.
TIMEOUT_S: Final = (5.0, 20.0)
# The API server ends a watch after so long. Longer than that, and a quiet connection is taken for a dead one.
WATCH_S: Final = 60
_WATCH_TIMEOUT_S: Final = (5.0, WATCH_S + 15.0)
_MAX_REASON: Final = 500
# A quota is a 403 too, and has room again once other jobs end.
_QUOTA: Final = "exceeded quota"

# Of waiting pods, those that Ray's workers and heads are.
_RAY_PODS: Final = "ray.io/is-ray-node=yes"


class ExpiredError(LauncherError):
    """The API server no longer knows the version that a watch was to go on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All RayJobs of the namespace, and the version of the world that they are of."""

    items: list[dict[str, Any]]
    resource_version: str


def open_client(kubeconfig: Path | None) -> client.ApiClient:
    """A client of the cluster that this process runs in, or of the one that a kubeconfig names.

    The service account's token is read anew every minute: Kubernetes replaces it long before it ends.

    Raises:
        SettingsError: neither is there.
    """
    configuration = client.Configuration()
    try:
        if kubeconfig is not None:
            config.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except (ConfigException, OSError) as error:
        raise SettingsError(
            "CLOISTER_LAUNCHER: kuberay needs a pod with a service account's token, or CLOISTER_KUBECONFIG with the "
            f"path of a kubeconfig: {error}"
        ) from error
    configuration.proxy = None  # the API server is reached directly; job specs must not go by a proxy
    return client.ApiClient(configuration)


class RayJobsApi:
    """RayJobs and waiting pods of one namespace. Safe to use from several threads.

    Every method raises ``LauncherError`` when the API server cannot be reached or refuses.
    """

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self._api = api
        self._host: str = api.configuration.host
        self._namespace = namespace
        self._objects = client.CustomObjectsApi(api)
        self._pods = client.CoreV1Api(api)
        self._kind: dict[str, Any] = {"group": GROUP, "version": VERSION, "namespace": namespace, "plural": PLURAL}

    def create(self, body: dict[str, Any]) -> bool:
        """Creates a RayJob; returns False when there is one of that name already.

        Raises:
            LaunchRefusedError: the API server, or a policy of the cluster, refuses the RayJob as it is.
        """
        name = body["metadata"]["name"]
        try:
            with self._translated(f"create the RayJob {name}"):
                self._objects.create_namespaced_custom_object(**self._kind, body=body, _request_timeout=TIMEOUT_S)
        except LauncherError as error:
            if _status(error) == CONFLICT:
                return False
            if _status(error) in REFUSALS and _QUOTA not in str(error):
                raise LaunchRefusedError(str(error)) from error
            raise
        return True

    def get(self, name: str) -> dict[str, Any] | None:
        """A RayJob as it is now; None when there is none."""
        try:
            with self._translated(f"read the RayJob {name}"):
                return _mapping(
                    self._objects.get_namespaced_custom_object(**self._kind, name=name, _request_timeout=TIMEOUT_S)
                )
        except LauncherError as error:
            if _status(error) == NOT_FOUND:
                return None
            raise

    def list_all(self) -> Listing:
        """All RayJobs as they are now."""
        with self._translated(f"list the RayJobs of {self._namespace}"):
            answer = _mapping(self._objects.list_namespaced_custom_object(**self._kind, _request_timeout=TIMEOUT_S))
        return Listing(items=answer["items"], resource_version=answer["metadata"]["resourceVersion"])

    def watch(self, watcher: watch.Watch, resource_version: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """What happens to RayJobs after a version, as (ADDED | MODIFIED | DELETED | BOOKMARK, RayJob), for a minute.

        Args:
            watcher: its ``stop`` ends the iteration from another thread.
            resource_version: of a listing or of the last event.

        Raises:
            ExpiredError: list anew.
        """
        with self._translated(f"watch the RayJobs of {self._namespace}"):
            for event in watcher.stream(  # type: ignore[no-untyped-call]
                self._objects.list_namespaced_custom_object,
                **self._kind,
                resource_version=resource_version,
                allow_watch_bookmarks=True,
                timeout_seconds=WATCH_S,
                _request_timeout=_WATCH_TIMEOUT_S,
            ):
                yield event["type"], event["raw_object"]

    def delete(self, name: str) -> None:
        """Deletes a RayJob; it is gone once its Ray cluster and all pods are. One that is not there is no error."""
        try:
            with self._translated(f"delete the RayJob {name}"):
                self._objects.delete_namespaced_custom_object(
                    **self._kind, name=name, propagation_policy="Foreground", _request_timeout=TIMEOUT_S
                )
        except LauncherError as error:
            if _status(error) != NOT_FOUND:
                raise

    def pods(self, phase: str) -> list[dict[str, Any]]:
        """The pods of all Ray clusters in one of Kubernetes' phases, e.g. ``Pending``."""
        with self._translated(f"list the pods of {self._namespace}"):
            pods = self._pods.list_namespaced_pod(
                self._namespace,
                label_selector=_RAY_PODS,
                field_selector=f"status.phase={phase}",
                _request_timeout=TIMEOUT_S,
            )
            plain = self._api.sanitize_for_serialization(pods)  # type: ignore[no-untyped-call]
        items: list[dict[str, Any]] = plain["items"]
        return items

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except ApiException as error:
            kind = ExpiredError if error.status == GONE else LauncherError
            raise kind(f"cannot {doing}: the Kubernetes API at {self._host} answered {_reason(error)}") from error
        except (HTTPError, OpenApiException, OSError) as error:
            cause = getattr(error, "reason", None) or error  # urllib3 wraps it in how often it tried
            raise LauncherError(
                f"cannot {doing}: cannot reach the Kubernetes API at {self._host}: {type(cause).__name__}"
            ) from error


def _status(error: LauncherError) -> int | None:
    cause = error.__cause__
    return cause.status if isinstance(cause, ApiException) else None


def _reason(error: ApiException) -> str:
    """The status and the API server's own words; never the request, which holds the job spec."""
    try:
        message = json.loads(error.body or "")["message"]
    except (ValueError, TypeError, KeyError):
        message = error.reason or "no reason given"
    return f"{error.status}: {str(message)[:_MAX_REASON]}"


def _mapping(answer: object) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise LauncherError("the Kubernetes API answered no object; is its address right?")
    return answer
