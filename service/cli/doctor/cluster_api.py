"""What the checks ask the Kubernetes API: they read, ask what is allowed, and try requests without effect."""

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
from service.cli.doctor.findings import RefusedError
from service.errors import CloisterError, SettingsError

JsonObject = dict[str, Any]
_UNAUTHORIZED: Final = 401
_FORBIDDEN: Final = 403
_MAX_REASON: Final = 500
# What a file that is no kubeconfig, or holds other than base64 in one, makes of its reader.
_NO_KUBECONFIG: Final = (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError)
_ACCESS_REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_HEADERS: Final = {"Accept": "application/json", "Content-Type": "application/json"}


class ClusterError(CloisterError):
    """The API server cannot be reached, or refused."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_login(self) -> bool:
        """Whether it does not know who asks."""
        return self.status == _UNAUTHORIZED


def open_kubeconfig(kubeconfig: Path | None, context: str) -> client.ApiClient:
    """A client of the cluster that a context names, with the login of its user.

    Args:
        kubeconfig: the file; None for $KUBECONFIG or ~/.kube/config.
        context: its name; empty for the file's current one.

    Raises:
        SettingsError: there is no such file or context, or something in it is wrong. A login that does not work is
            not seen here: requests then come from nobody.
    """
    configuration = client.Configuration()
    # A person waits for each line: one try is enough.
    configuration.retries = False
    name = str(kubeconfig) if kubeconfig else None
    try:
        config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=name, context=context or None, client_configuration=configuration, persist_config=False
        )
    except (ConfigException, OSError, *_NO_KUBECONFIG) as error:
        where = name or "$KUBECONFIG or ~/.kube/config"
        raise SettingsError(f"{where} does not lead to a cluster: {_what_is_there(name, context, error)}") from error
    return client.ApiClient(configuration)


def _what_is_there(kubeconfig: str | None, context: str, error: Exception) -> str:
    try:
        merged = KubeConfigMerger(kubeconfig or KUBE_CONFIG_DEFAULT_LOCATION).config  # type: ignore[no-untyped-call]
        names = [str(each["name"]) for each in merged.value["contexts"]] if merged else []
    except (ConfigException, OSError, *_NO_KUBECONFIG) as unreadable:
        # The reader's own text may quote a token.
        reason = unreadable.strerror if isinstance(unreadable, OSError) else type(unreadable).__name__
        return f"it cannot be read as a kubeconfig ({reason}). Name another with --kubeconfig"
    if merged is None:
        return "there is no such file. Name one with --kubeconfig"
    if context and context not in names:
        return f"it has no context {context!r}. It has: {', '.join(names)}"
    if not context and not merged.value.get("current-context"):
        return f"it has no current context: name one with --context. It has: {', '.join(names)}"
    if isinstance(error, ConfigException | OSError):
        return str(error)
    return f"something of its context is wrong, such as certificate or key ({type(error).__name__})"


class ClusterApi:
    """Objects of a cluster as plain JSON.

    Every method raises ``RefusedError`` for what this user may not do, and ``ClusterError`` when the API server cannot
    be reached or refuses for another reason.
    """

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self.server: str = api.configuration.host

    def read(self, path: str, **parameters: str) -> JsonObject:
        """One object, or a list."""
        return self._send("GET", path, parameters)

    def find(self, path: str) -> JsonObject | None:
        """One object; None when there is none."""
        try:
            return self.read(path)
        except ClusterError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def items(self, path: str, **parameters: str) -> list[JsonObject]:
        """The objects of a list."""
        found: list[JsonObject] = self.read(path, **parameters).get("items", [])
        return found

    def may(self, verb: str, resource: str, namespace: str = "") -> bool:
        """Whether this user may do something.

        Args:
            verb: ``create``, …, or ``*`` for everything.
            resource: ``deployments.apps``, ``pods``, ``pods/exec``.
            namespace: where; empty for everywhere, and for what belongs to no namespace.
        """
        kind, _, group = resource.partition(".")
        kind, _, subresource = kind.partition("/")
        asked = {"group": group, "resource": kind, "subresource": subresource, "verb": verb, "namespace": namespace}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        answer = self._send("POST", _ACCESS_REVIEWS, {}, {**review, "spec": {"resourceAttributes": asked}})
        return bool(answer.get("status", {}).get("allowed"))

    def try_to_create(self, path: str, body: JsonObject) -> None:
        """Lets the API server make every check for a new object, without making it."""
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
            answer = self._api.call_api(*request, _request_timeout=TIMEOUT_S)
            content, status = answer.read(), answer.status  # type: ignore[no-untyped-call]
        except (HTTPError, OpenApiException, OSError) as error:
            if isinstance(error, ApiException) and error.status:
                content, status = error.body or "", error.status
            else:
                raise ClusterError(
                    f"cannot reach the Kubernetes API at {self.server}: {error}. Check the context's server and login"
                ) from error
        return _answer(f"{method} {path}", status, content)


def _answer(request: str, status: int, content: bytes | str) -> JsonObject:
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    if status < 400 and isinstance(body, dict):  # noqa: PLR2004 - HTTP's own border
        return body
    reason = body.get("message") if isinstance(body, dict) else "no JSON object; is this a Kubernetes API?"
    message = f"{request}: {status}: {str(reason)[:_MAX_REASON]}"
    if status == _FORBIDDEN:
        raise RefusedError(message)
    raise ClusterError(message, status)
