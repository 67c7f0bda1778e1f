"""Requests of the checks to the Kubernetes API: reads, access reviews, and temporary objects, with the official client.

The checks read JSON: the client's typed models refuse objects with fields that their version does not expect, and have
no types for custom resources.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException, OpenApiException
from kubernetes.config.config_exception import ConfigException
from kubernetes.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION, KubeConfigMerger
from urllib3.exceptions import HTTPError

from service.adapters.rayjobs_api import NOT_FOUND, TIMEOUT_S
from service.doctor.findings import ClusterError
from service.errors import SettingsError

JsonObject = dict[str, Any]
_BAD_REQUEST: Final = 400
_MAX_REASON: Final = 500
# Errors of the client for a file that is no kubeconfig, or that holds invalid base64.
_INVALID_KUBECONFIG: Final = (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError)
_ACCESS_REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_HEADERS: Final = {"Accept": "application/json", "Content-Type": "application/json"}


def open_kubeconfig(kubeconfig: Path | None, context: str) -> client.ApiClient:
    """Return a client for the cluster and user of a context.

    Args:
        kubeconfig: the file; None for $KUBECONFIG or ~/.kube/config.
        context: the name of the context; empty for the current context.

    Raises:
        SettingsError: the file or the context does not exist or is invalid. A login that does not work is no error
            here: its requests are anonymous.
    """
    configuration = client.Configuration()
    # A person waits for each line of the report: requests are not retried.
    configuration.retries = False
    name = str(kubeconfig) if kubeconfig else None
    try:
        config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=name, context=context or None, client_configuration=configuration, persist_config=False
        )
    except (ConfigException, OSError, *_INVALID_KUBECONFIG) as error:
        try:
            merged = KubeConfigMerger(name or KUBE_CONFIG_DEFAULT_LOCATION).config  # type: ignore[no-untyped-call]
            contexts = [str(each["name"]) for each in merged.value["contexts"]] if merged else []
        except (ConfigException, OSError, *_INVALID_KUBECONFIG) as unreadable:
            # The text of the error may quote a token.
            cause = unreadable.strerror if isinstance(unreadable, OSError) else type(unreadable).__name__
            reason = f"it cannot be read as a kubeconfig ({cause}). Name another file with --kubeconfig"
        else:
            if merged is None:
                reason = "there is no such file. Name a file with --kubeconfig"
            elif context and context not in contexts:
                reason = f"it has no context {context!r}. It has: {', '.join(contexts)}"
            elif not context and not merged.value.get("current-context"):
                reason = f"it has no current context: name one with --context. It has: {', '.join(contexts)}"
            elif isinstance(error, ConfigException | OSError):
                reason = str(error)
            else:
                reason = f"its context is invalid, e.g. a certificate or a key ({type(error).__name__})"
        raise SettingsError(f"{name or '$KUBECONFIG or ~/.kube/config'} names no cluster: {reason}") from error
    return client.ApiClient(configuration)


class ClusterApi:
    """Objects of a cluster as JSON.

    Every method raises ``ClusterError`` if the API server is unreachable or refuses the request.

    Args:
        api: the official client.

    Attributes:
        server: the URL of the API server.
    """

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self.server: str = api.configuration.host

    def read(self, path: str, **parameters: str) -> JsonObject:
        """Return an object or a list."""
        return self._send("GET", path, parameters)

    def find(self, path: str) -> JsonObject | None:
        """Return an object; None if it does not exist."""
        try:
            return self.read(path)
        except ClusterError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def items(self, path: str, **parameters: str) -> list[JsonObject]:
        """Return the objects of a list."""
        found: list[JsonObject] = self.read(path, **parameters).get("items", [])
        return found

    def may(self, verb: str, resource: str, namespace: str = "", *, name: str = "") -> bool:
        """Return whether the user has a permission.

        Args:
            verb: the verb, such as ``create``; ``*`` for all verbs.
            resource: the resource and its group, such as ``deployments.apps``, ``pods`` or ``pods/exec``.
            namespace: the namespace; empty for all namespaces and for resources without one.
            name: the object; empty for all objects.
        """
        kind, _, group = resource.partition(".")
        kind, _, subresource = kind.partition("/")
        wanted = {"group": group, "resource": kind, "subresource": subresource, "verb": verb, "namespace": namespace}
        if name:
            wanted["name"] = name
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        answer = self._send("POST", _ACCESS_REVIEWS, {}, {**review, "spec": {"resourceAttributes": wanted}})
        return bool(answer.get("status", {}).get("allowed"))

    def create(self, path: str, body: JsonObject) -> JsonObject:
        """Create an object and return it."""
        return self._send("POST", path, {}, body)

    def delete(self, path: str) -> None:
        """Delete an object, and return before it is gone. An object that does not exist is no error."""
        try:
            self._send("DELETE", path, {"propagationPolicy": "Background"})
        except ClusterError as error:
            if error.status != NOT_FOUND:
                raise

    def dry_run_create(self, path: str, body: JsonObject) -> None:
        """Validate and admit a new object on the API server without creating it."""
        self._send("POST", path, {"dryRun": "All"}, body)

    def _send(self, method: str, path: str, parameters: Mapping[str, str], body: object = None) -> JsonObject:
        request = self._api.param_serialize(
            method=method,
            resource_path=path,
            query_params=list(parameters.items()),
            header_params=dict(_HEADERS),
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            response = self._api.call_api(*request, _request_timeout=TIMEOUT_S)
            content, status = response.read(), response.status  # type: ignore[no-untyped-call]
        except (HTTPError, OpenApiException, OSError) as error:
            if not (isinstance(error, ApiException) and error.status):
                raise ClusterError(
                    f"cannot reach the Kubernetes API at {self.server}: {error}. Check the context's server and login"
                ) from error
            content, status = error.body or "", error.status
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if status < _BAD_REQUEST and isinstance(answer, dict):
            return answer
        reason = answer.get("message") if isinstance(answer, dict) else "no JSON object; is this a Kubernetes API?"
        message = f"{method} {path}: {status}: {str(reason)[:_MAX_REASON]}"
        raise ClusterError(message, status)
