"""The requests to the Kubernetes API that running jobs as RayJobs needs, through the official client.

Each error of the client becomes a ``LauncherError`` with the attempted request and the API server's message.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException, OpenApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError

from ray_job.contract.cluster import JOBS_OWNER
from ray_job.contract.rayjobs import GROUP, PLURAL, VERSION
from service.errors import LauncherError, LaunchRefusedError, SettingsError

# The same request gets the same answer until someone changes a role, a template or a policy.
REFUSALS: Final = frozenset({400, 403, 422})
NOT_FOUND: Final = 404
CONFLICT: Final = 409
GONE: Final = 410

# Seconds to connect, and between two reads.
TIMEOUT_S: Final = (5.0, 20.0)
# The API server ends a watch after this time. A connection that is silent for longer is treated as lost.
WATCH_S: Final = 60
_WATCH_TIMEOUT_S: Final = (5.0, WATCH_S + 15.0)
_MAX_REASON: Final = 500
# An exceeded quota is a 403 too, but has room again when other jobs end.
_QUOTA: Final = "exceeded quota"

# Selects the pods of Ray heads and workers.
_RAY_PODS: Final = "ray.io/is-ray-node=yes"


class KubernetesApiError(LauncherError):
    """The API server answered a request with an error.

    Args:
        message: the request and the answer.
        status: the HTTP status. 410 means that the server no longer has the version from which a watch should continue.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def open_client(kubeconfig: Path | None) -> client.ApiClient:
    """Return a client of the cluster in a kubeconfig, or of the cluster that this process runs in if it is None.

    The client reads the service account's token again every minute: Kubernetes replaces it before it expires.

    Raises:
        SettingsError: the kubeconfig is invalid, or this process does not run in a pod with a service account.
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
    configuration.proxy = None  # job specs must not pass through a proxy
    return client.ApiClient(configuration)


class RayJobsApi:
    """RayJobs, their Secrets, network policies and pods in one namespace. Safe to use from several threads.

    Every method raises ``KubernetesApiError`` when the API server refuses the request, and ``LauncherError`` when it
    cannot be reached.
    """

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self._api = api
        self._host: str = api.configuration.host
        self._namespace = namespace
        self._objects = client.CustomObjectsApi(api)
        self._core = client.CoreV1Api(api)
        self._networking = client.NetworkingV1Api(api)
        self._kind: dict[str, Any] = {"group": GROUP, "version": VERSION, "namespace": namespace, "plural": PLURAL}

    def create(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Create a RayJob and return it as it was stored; return None if one of that name exists.

        Raises:
            LaunchRefusedError: the API server, or a policy of the cluster, refuses the RayJob as it is.
        """
        try:
            return self._request(
                f"create the RayJob {body['metadata']['name']}",
                self._objects.create_namespaced_custom_object,
                body=body,
            )
        except KubernetesApiError as error:
            if error.status == CONFLICT:
                return None
            if error.status in REFUSALS and _QUOTA not in str(error):
                raise LaunchRefusedError(str(error)) from error
            raise

    def owner(self) -> dict[str, Any] | None:
        """Return the reference to the owner of all RayJobs; None in a stack that was deployed without it."""
        try:
            with self._translated(f"read the ConfigMap {JOBS_OWNER}"):
                found: Any = self._core.read_namespaced_config_map(
                    JOBS_OWNER, self._namespace, _request_timeout=TIMEOUT_S
                )
        except KubernetesApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": JOBS_OWNER,
            "uid": found.metadata.uid,
            "blockOwnerDeletion": True,
        }

    def put_secret(self, body: dict[str, Any]) -> None:
        """Create a Secret, or replace the one of that name."""
        name = body["metadata"]["name"]
        secret: Any = body  # the client accepts plain objects too
        try:
            with self._translated(f"create the Secret {name}"):
                self._core.create_namespaced_secret(self._namespace, secret, _request_timeout=TIMEOUT_S)
        except KubernetesApiError as error:
            if error.status != CONFLICT:
                raise
            with self._translated(f"replace the Secret {name}"):
                self._core.replace_namespaced_secret(name, self._namespace, secret, _request_timeout=TIMEOUT_S)

    def ensure_network_policy(self, body: dict[str, Any]) -> None:
        """Create a NetworkPolicy unless one of that name exists."""
        policy: Any = body
        try:
            with self._translated(f"create the NetworkPolicy {body['metadata']['name']}"):
                self._networking.create_namespaced_network_policy(self._namespace, policy, _request_timeout=TIMEOUT_S)
        except KubernetesApiError as error:
            if error.status != CONFLICT:
                raise

    def get(self, name: str) -> dict[str, Any] | None:
        """Return the current RayJob; None if it does not exist."""
        try:
            return self._request(f"read the RayJob {name}", self._objects.get_namespaced_custom_object, name=name)
        except KubernetesApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def list_all(self) -> tuple[list[dict[str, Any]], str]:
        """Return all current RayJobs of the namespace, and the resource version of the list."""
        answer = self._request(f"list the RayJobs of {self._namespace}", self._objects.list_namespaced_custom_object)
        return answer["items"], answer["metadata"]["resourceVersion"]

    def watch(self, watcher: watch.Watch, resource_version: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the changes of RayJobs after a version, for a minute.

        Each is a pair of ADDED, MODIFIED, DELETED or BOOKMARK, and the RayJob.

        Args:
            watcher: its ``stop`` ends the iteration; may be called in another thread.
            resource_version: of a listing or of the last event.

        Raises:
            KubernetesApiError: with the status ``GONE``, the version is too old; list again.
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
        """Delete a RayJob, after its Ray cluster and all its pods. A missing RayJob is no error."""
        try:
            self._request(
                f"delete the RayJob {name}",
                self._objects.delete_namespaced_custom_object,
                name=name,
                propagation_policy="Foreground",
            )
        except KubernetesApiError as error:
            if error.status != NOT_FOUND:
                raise

    def pods(self, phase: str) -> list[dict[str, Any]]:
        """Return the pods of all Ray clusters in a phase such as ``Pending``."""
        with self._translated(f"list the pods of {self._namespace}"):
            pods = self._core.list_namespaced_pod(
                self._namespace,
                label_selector=_RAY_PODS,
                field_selector=f"status.phase={phase}",
                _request_timeout=TIMEOUT_S,
            )
            plain = self._api.sanitize_for_serialization(pods)  # type: ignore[no-untyped-call]
        items: list[dict[str, Any]] = plain["items"]
        return items

    def _request(self, doing: str, method: Callable[..., object], **options: Any) -> dict[str, Any]:
        with self._translated(doing):
            answer = method(**self._kind, **options, _request_timeout=TIMEOUT_S)
        if not isinstance(answer, dict):
            raise LauncherError("the Kubernetes API did not answer with a JSON object; check its address")
        return answer

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except ApiException as error:
            # Only the API server's message: the request contains the job spec or the token.
            try:
                message = json.loads(error.body or "")["message"]
            except (ValueError, TypeError, KeyError):
                message = error.reason or "no reason given"
            raise KubernetesApiError(
                f"cannot {doing}: the Kubernetes API at {self._host} answered {error.status}: "
                f"{str(message)[:_MAX_REASON]}",
                error.status,
            ) from error
        except (HTTPError, OpenApiException, OSError) as error:
            cause = getattr(error, "reason", None) or error  # urllib3 wraps the cause in an error about its retries
            raise LauncherError(
                f"cannot {doing}: cannot reach the Kubernetes API at {self._host}: {type(cause).__name__}"
            ) from error
