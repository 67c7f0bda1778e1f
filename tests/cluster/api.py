"""Client of the Kubernetes API for any kind of object, with server-side apply and the server's warnings."""

import json
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx

JsonObject = dict[str, Any]
_NOT_FOUND: Final = 404
_MORE_ATTEMPTS: Final = 2


class ApiError(Exception):
    """The API server refused a request.

    Attributes:
        status: HTTP status.
        message: message of the server.
        reason: machine-readable reason of the server, e.g. ``AlreadyExists``; empty if it sent none.
    """

    def __init__(self, status: int, message: str, *, reason: str = "") -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.reason = reason


class UnknownKindError(ApiError):
    """The server does not serve the kind, e.g. because its custom resource definition is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An object as the server stored it, with the server's warnings (``Warning`` headers)."""

    body: JsonObject
    warnings: tuple[str, ...]


class KubernetesApi:
    """Objects of a cluster. Use it as a context manager; it is safe to use from several threads.

    Args:
        kubeconfig: file with one context whose user has a token.
    """

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        headers = {"Authorization": f"Bearer {user['token']}"}
        self._http = httpx.Client(
            base_url=cluster["server"], headers=headers, verify=context, trust_env=False, timeout=30
        )
        self._kinds: dict[tuple[str, str], JsonObject] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def is_ready(self) -> bool:
        """Return whether the server reports that it is ready."""
        return self._http.get("/readyz").is_success

    def find(self, api_version: str, kind: str, name: str, namespace: str = "") -> JsonObject | None:
        """Return one object, or None if it does not exist."""
        try:
            return self._send("GET", self._path(api_version, kind, name, namespace)).body
        except UnknownKindError:
            raise
        except ApiError as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    def list(self, api_version: str, kind: str, namespace: str = "") -> list[JsonObject]:
        """Return all objects of a kind, in one namespace or in all."""
        items: list[JsonObject] = self._send("GET", self._path(api_version, kind, "", namespace)).body["items"]
        return items

    def create(self, body: JsonObject, *, field_manager: str = "", dry_run: bool = False) -> Answer:
        """Create an object; with ``dry_run`` only run the server's checks for it."""
        namespace = (body.get("metadata") or {}).get("namespace", "")
        path = self._path(body["apiVersion"], body["kind"], "", namespace)
        parameters = ({"fieldManager": field_manager} if field_manager else {}) | ({"dryRun": "All"} if dry_run else {})
        return self._send("POST", path, parameters, json=body)

    def apply(self, body: JsonObject, *, field_manager: str, force: bool = False, dry_run: bool = False) -> Answer:
        """Apply an object on the server: https://kubernetes.io/docs/reference/using-api/server-side-apply/."""
        metadata = body["metadata"]
        path = self._path(body["apiVersion"], body["kind"], metadata["name"], metadata.get("namespace", ""))
        parameters = {"fieldManager": field_manager, "force": json.dumps(force)} | (
            {"dryRun": "All"} if dry_run else {}
        )
        headers = {"Content-Type": "application/apply-patch+yaml"}
        return self._send("PATCH", path, parameters, content=json.dumps(body).encode(), headers=headers)

    def patch(self, body: JsonObject, *, field_manager: str, subresource: str = "") -> JsonObject:
        """Send a merge patch of the fields in ``body``, as `kubectl edit` does."""
        metadata = body["metadata"]
        path = self._path(
            body["apiVersion"], body["kind"], metadata["name"], metadata.get("namespace", ""), subresource
        )
        headers = {"Content-Type": "application/merge-patch+json"}
        content = json.dumps(body).encode()
        return self._send("PATCH", path, {"fieldManager": field_manager}, content=content, headers=headers).body

    def replace_managed_fields(self, live: JsonObject, managed_fields: Sequence[JsonObject]) -> None:
        """Replace the managed fields of an object, unless it has changed since it was read."""
        metadata = live["metadata"]
        path = self._path(live["apiVersion"], live["kind"], metadata["name"], metadata.get("namespace", ""))
        patch = [
            {"op": "replace", "path": "/metadata/managedFields", "value": [*managed_fields]},
            {"op": "replace", "path": "/metadata/resourceVersion", "value": metadata["resourceVersion"]},
        ]
        headers = {"Content-Type": "application/json-patch+json"}
        self._send("PATCH", path, content=json.dumps(patch).encode(), headers=headers)

    def delete(
        self,
        api_version: str,
        kind: str,
        name: str,
        namespace: str = "",
        *,
        now: bool = False,
        propagation: str = "Background",
    ) -> None:
        """Delete an object and its dependents; a missing object is no error."""
        parameters = {"propagationPolicy": propagation} | ({"gracePeriodSeconds": "0"} if now else {})
        try:
            self._send("DELETE", self._path(api_version, kind, name, namespace), parameters)
        except UnknownKindError:
            raise
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise

    def evict(self, name: str, namespace: str) -> None:
        """Evict a pod, as `kubectl drain` does: https://kubernetes.io/docs/concepts/scheduling-eviction/api-eviction/."""
        metadata = {"name": name, "namespace": namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        self._send("POST", self._path("v1", "Pod", name, namespace, "eviction"), json=body)

    def wait_until_gone(self, api_version: str, kind: str, name: str, namespace: str = "", *, within_s: float) -> None:
        """Wait until an object has been deleted.

        Raises:
            TimeoutError: the object still exists; the message contains what blocks its deletion.
        """
        end = time.monotonic() + within_s
        while (found := self.find(api_version, kind, name, namespace)) is not None:
            if time.monotonic() > end:
                why = found.get("status", {}).get("conditions") or found["metadata"].get("finalizers")
                raise TimeoutError(f"{kind} {namespace}/{name} is still there after {within_s} s: {why}")
            time.sleep(0.2)

    def token(self, account: str, namespace: str) -> str:
        """Return a token of a service account, like the one in its pods."""
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        path = self._path("v1", "ServiceAccount", account, namespace, "token")
        return str(self._send("POST", path, json=body).body["status"]["token"])

    def may(self, group: str, resource: str, verb: str, namespace: str, name: str = "") -> bool:
        """Return whether the kubeconfig's user may do this; a subresource is written as ``pods/exec``.

        Without a name it is asked for all objects.
        """
        kind, _, subresource = resource.partition("/")
        asked = {"group": group, "resource": kind, "subresource": subresource, "verb": verb, "namespace": namespace}
        if name:
            asked["name"] = name
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        answer = self.create({**review, "spec": {"resourceAttributes": asked}})
        return bool(answer.body["status"]["allowed"])

    def knows(self, api_version: str, kind: str) -> bool:
        """Return whether the server serves this kind."""
        try:
            self._kind(api_version, kind)
        except UnknownKindError:
            return False
        return True

    def wait_until_known(self, api_version: str, kind: str, *, within_s: float = 30) -> None:
        """Wait until the server serves a kind whose definition has just been created."""
        end = time.monotonic() + within_s
        while not self.knows(api_version, kind):
            if time.monotonic() > end:
                raise TimeoutError(f"the API server does not serve {kind} {within_s} s after its definition was made")
            time.sleep(0.2)

    def _kind(self, api_version: str, kind: str) -> JsonObject:
        if (api_version, kind) not in self._kinds:
            try:
                resources = self._send("GET", _group_path(api_version)).body["resources"]
            except ApiError as error:
                raise UnknownKindError(error.status, f"no such API: {api_version}") from error
            for each in resources:
                if "/" not in each["name"]:
                    self._kinds[api_version, each["kind"]] = each
        if (api_version, kind) not in self._kinds:
            raise UnknownKindError(_NOT_FOUND, f"no such kind: {api_version} {kind}")
        return self._kinds[api_version, kind]

    def _path(self, api_version: str, kind: str, name: str, namespace: str, subresource: str = "") -> str:
        found = self._kind(api_version, kind)
        inside = f"/namespaces/{namespace}" if found["namespaced"] and namespace else ""
        parts = [_group_path(api_version) + inside, found["name"], name, subresource]
        return "/".join(part for part in parts if part)

    def _send(self, method: str, path: str, parameters: dict[str, str] | None = None, **content: Any) -> Answer:
        answer = self._answer(method, path, params=parameters, **content)
        try:
            body = answer.json()
        except ValueError:
            body = {"message": answer.text}
        if answer.is_error:
            raise ApiError(answer.status_code, body.get("message", ""), reason=body.get("reason", ""))
        # The header is `299 - "text"`: https://www.rfc-editor.org/rfc/rfc9111#name-warning
        warnings = [text.partition('"')[2].rpartition('"')[0] for text in answer.headers.get_list("Warning")]
        return Answer(body=body, warnings=tuple(warnings))

    def _answer(self, method: str, path: str, **content: Any) -> httpx.Response:
        """Repeat requests that the server did not process: it may close a kept connection just as it is used."""
        for _ in range(_MORE_ATTEMPTS if method != "POST" else 0):
            with suppress(httpx.RemoteProtocolError):
                return self._http.request(method, path, **content)
        return self._http.request(method, path, **content)


def _group_path(api_version: str) -> str:
    return f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
