"""A stand-in for the `kubernetes` provider: Pulumi's real engine on one side, a real API server on the other.

It speaks Pulumi's provider protocol, and gives the API server each object by server-side apply. It is for machines on
which `pulumi-resource-kubernetes` is not to be had. What it cannot do, or does in another way than the real one:

- Told to wait (``is_waiting``), it waits as the real one does for Jobs, Deployments, StatefulSets, Services and volume
  claims (``readiness.py``). What did not become ready is not in the state, and the next `up` makes it again. Otherwise
  it awaits nothing but the end of deletions: without a kubelet nothing ever becomes ready.
- No Helm charts, no invokes, no lists, no names that the provider makes up: each is an error that says so.
- What replaces an object is its kind, name and namespace, and the fields of ``_IMMUTABLE``, a part of the real list.
- It knows one cluster: that of the provider that was configured last, by a kubeconfig file with a token.
- Of the annotations ``pulumi.com/*`` it obeys patchFieldManager, patchForce and skipAwait.
- A refresh asks the API server by a dry run what the inputs would change; that is its drift. Fields that the inputs
  do not have are of no interest to it.
"""

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc
from google.protobuf import empty_pb2
from pulumi.runtime.proto import plugin_pb2, provider_pb2, provider_pb2_grpc

from tests.cluster.api import ApiError, KubernetesApi, UnknownKindError
from tests.cluster.provider_values import (
    Secret,
    differences,
    from_struct,
    has_unknown,
    hidden_like,
    revealed,
    to_struct,
)
from tests.cluster.readiness import NeverReadyError, wait_until_ready

VERSION: Final = "4.34.2"
_FIELD_MANAGER: Final = "pulumi-kubernetes-stand-in"
_IMMUTABLE: Final = {
    "Job": ("spec.selector", "spec.template", "spec.completions"),
    "PersistentVolumeClaim": ("spec.accessModes", "spec.storageClassName", "spec.volumeName"),
    "RoleBinding": ("roleRef",),
    "StatefulSet": ("spec.selector", "spec.serviceName", "spec.podManagementPolicy", "spec.volumeClaimTemplates"),
    "Deployment": ("spec.selector",),
    "Service": ("spec.clusterIP",),
    "PriorityClass": ("value", "preemptionPolicy"),
}
_IDENTITY: Final = ("apiVersion", "kind", "metadata.name", "metadata.namespace")
_KINDS: Final = {"add": "ADD", "delete": "DELETE", "update": "UPDATE"}
_DELETION_S: Final = 300.0
_READY_S: Final = 600.0
_NOT_FOUND: Final = 404

logger = logging.getLogger(__name__)


class StandInProvider(provider_pb2_grpc.ResourceProviderServicer):
    """The methods of the protocol; the names are gRPC's.

    Attributes:
        warnings: what the API server warned of, with the object's kind and name.
        is_forcing: take fields from whoever else has set them, as the real one does with
            ``PULUMI_K8S_ENABLE_PATCH_FORCE=true`` in its environment.

    Args:
        is_waiting: an object is there once it is ready.
    """

    def __init__(self, *, is_waiting: bool = False) -> None:
        self.warnings: list[str] = []
        self.is_forcing = False
        self._is_waiting = is_waiting
        self._api: KubernetesApi | None = None
        self._kubeconfig = ""

    def close(self) -> None:
        """Ends the connections to the API server."""
        if self._api is not None:
            self._api.close()

    def Handshake(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return provider_pb2.ProviderHandshakeResponse(accept_secrets=True, accept_resources=False, accept_outputs=False)

    def GetPluginInfo(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return plugin_pb2.PluginInfo(version=VERSION)

    def Attach(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return empty_pb2.Empty()

    def Cancel(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return empty_pb2.Empty()

    def CheckConfig(self, request: Any, _context: Any) -> Any:  # noqa: N802
        return provider_pb2.CheckResponse(inputs=request.news)

    def DiffConfig(self, request: Any, _context: Any) -> Any:  # noqa: N802
        return _diff(differences(revealed(from_struct(request.olds)), revealed(from_struct(request.news))), ())

    def Configure(self, request: Any, _context: Any) -> Any:  # noqa: N802
        arguments = revealed(from_struct(request.args))
        path = arguments.get("kubeconfig", "")
        if path and path != self._kubeconfig:
            self.close()
            self._api, self._kubeconfig = KubernetesApi(Path(path)), path
        return provider_pb2.ConfigureResponse(
            acceptSecrets=True, supportsPreview=True, acceptResources=False, acceptOutputs=False
        )

    def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        inputs = revealed(from_struct(request.news))
        if "apiVersion" not in inputs or not (inputs.get("metadata") or {}).get("name"):
            _refuse(context, f"{request.urn}: only Kubernetes objects with a name of their own, no charts")
        return provider_pb2.CheckResponse(inputs=request.news)

    def Diff(self, request: Any, _context: Any) -> Any:  # noqa: N802
        old, new = revealed(from_struct(request.old_inputs)), revealed(from_struct(request.news))
        return _diff(differences(old, new), (*_IDENTITY, *_IMMUTABLE.get(new["kind"], ())))

    def Create(self, request: Any, context: Any) -> Any:  # noqa: N802
        inputs = from_struct(request.properties)
        with _told(context, request.urn):
            live = self._applied(inputs, request)
        return provider_pb2.CreateResponse(id=_id(inputs), properties=to_struct(_outputs(live, inputs)))

    def Update(self, request: Any, context: Any) -> Any:  # noqa: N802
        inputs = from_struct(request.news)
        with _told(context, request.urn):
            wanted = self._without_ignored(inputs, list(request.ignoreChanges))
            live = self._applied(wanted, request)
        return provider_pb2.UpdateResponse(properties=to_struct(_outputs(live, inputs)))

    def Read(self, request: Any, context: Any) -> Any:  # noqa: N802
        inputs = from_struct(request.inputs)
        with _told(context, request.urn):
            live = self._find(inputs)
            if live is None:
                return provider_pb2.ReadResponse()
            drifted = self._drifted(inputs, live)
        return provider_pb2.ReadResponse(
            id=request.id, inputs=to_struct(drifted), properties=to_struct(_outputs(live, inputs))
        )

    def Delete(self, request: Any, context: Any) -> Any:  # noqa: N802
        inputs = revealed(from_struct(request.old_inputs))
        metadata = inputs["metadata"]
        place = (inputs["apiVersion"], inputs["kind"], metadata["name"], metadata.get("namespace", ""))
        with _told(context, request.urn):
            if _is_patch(request.urn):
                # What a manager does not name any more is no longer there on its behalf.
                bare = {key: inputs[key] for key in ("apiVersion", "kind")} | {"metadata": {"name": metadata["name"]}}
                self._server.apply(bare, field_manager=_manager(inputs))
            else:
                self._server.delete(*place)
                self._server.wait_until_gone(*place, within_s=request.timeout or _DELETION_S)
        return empty_pb2.Empty()

    @property
    def _server(self) -> KubernetesApi:
        if self._api is None:
            raise ApiError(0, "the provider has no kubeconfig")
        return self._api

    def _applied(self, inputs: dict[str, Any], request: Any) -> dict[str, Any]:
        live = self._apply(inputs, preview=request.preview, patch=_is_patch(request.urn))
        if request.preview or not self._is_waiting:
            return live
        return wait_until_ready(self._server, revealed(inputs), within_s=request.timeout or _READY_S)

    def _apply(self, inputs: dict[str, Any], *, preview: bool, patch: bool) -> dict[str, Any]:
        body = revealed(inputs)
        if preview and has_unknown(body):
            return body
        if patch and self._find(inputs) is None:
            raise ApiError(_NOT_FOUND, f"there is no {body['kind']} {body['metadata']['name']} to patch")
        force = self.is_forcing or body["metadata"].get("annotations", {}).get("pulumi.com/patchForce") == "true"
        try:
            answer = self._server.apply(body, field_manager=_manager(body), force=force, dry_run=preview)
        except ApiError as error:
            # A preview cannot try what is in a namespace, or of a kind, that only `up` will make.
            if preview and error.status == _NOT_FOUND:
                return body
            raise
        if not preview:
            title = f"{body['kind']} {body['metadata']['name']}"
            self.warnings += [f"{title}: {warning}" for warning in answer.warnings]
        return answer.body

    def _find(self, inputs: dict[str, Any]) -> dict[str, Any] | None:
        body = revealed(inputs)
        metadata = body["metadata"]
        try:
            return self._server.find(body["apiVersion"], body["kind"], metadata["name"], metadata.get("namespace", ""))
        except UnknownKindError:
            return None

    def _drifted(self, inputs: dict[str, Any], live: dict[str, Any]) -> dict[str, Any]:
        """The inputs, and in them what the cluster has where applying them anew would change it."""
        body = revealed(inputs)
        wanted = self._server.apply(body, field_manager=_manager(body), force=True, dry_run=True).body
        found = dict(inputs)
        for part in body.keys() - {"apiVersion", "kind", "metadata", "stringData"}:
            if differences(wanted.get(part), live.get(part)):
                found[part] = hidden_like(_restricted(live.get(part), body[part]), inputs[part])
        if "stringData" in body and differences(wanted.get("data"), live.get("data")):
            found["stringData"] = Secret({"changed outside of Pulumi": "true"})
        return found | {"metadata": _restricted(live["metadata"], body["metadata"])}

    def _without_ignored(self, inputs: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
        """The live value in place of what Pulumi is told to leave alone: others own it."""
        live = self._find(inputs) if ignored else None
        for path in ignored:
            *parents, last = path.split(".")
            target, source = inputs, live or {}
            for parent in parents:
                target, source = target[parent], source.get(parent, {})
            if last in source:
                target[last] = source[last]
        return inputs


@contextmanager
def stand_in_provider(*, is_waiting: bool = False) -> Iterator[tuple[StandInProvider, int]]:
    """Serves the stand-in; gives it and its port, for ``PULUMI_DEBUG_PROVIDERS=kubernetes:<port>``."""
    provider = StandInProvider(is_waiting=is_waiting)
    server = grpc.server(
        ThreadPoolExecutor(max_workers=16), options=[("grpc.max_receive_message_length", 64 * 1024 * 1024)]
    )
    provider_pb2_grpc.add_ResourceProviderServicer_to_server(provider, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield provider, port
    finally:
        server.stop(grace=2).wait()
        provider.close()


def _diff(changes: dict[str, str], replacing: tuple[str, ...]) -> Any:
    replaces = [path for path in changes if any(_is_below(path, fixed) for fixed in replacing)]
    detailed = {}
    for path, change in changes.items():
        kind = _KINDS[change] + ("_REPLACE" if path in replaces else "")
        detailed[path] = provider_pb2.PropertyDiff(kind=kind, inputDiff=True)
    response = provider_pb2.DiffResponse
    return provider_pb2.DiffResponse(
        changes=response.DIFF_SOME if changes else response.DIFF_NONE,
        diffs=sorted({path.split(".")[0].split("[")[0] for path in changes}),
        replaces=replaces,
        detailedDiff=detailed,
        hasDetailedDiff=True,
        # A name is taken once.
        deleteBeforeReplace=bool(replaces),
    )


def _is_below(path: str, parent: str) -> bool:
    return path == parent or path.startswith((f"{parent}.", f"{parent}["))


def _restricted(live: Any, wanted: Any) -> Any:
    """Of ``live`` what ``wanted`` speaks of."""
    if isinstance(live, dict) and isinstance(wanted, dict):
        return {key: _restricted(live[key], wanted[key]) for key in wanted if key in live}
    if isinstance(live, list) and isinstance(wanted, list) and len(live) == len(wanted):
        return [_restricted(a, b) for a, b in zip(live, wanted, strict=True)]
    return live


def _outputs(live: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    body = json.loads(json.dumps(live))
    (body.get("metadata") or {}).pop("managedFields", None)
    hidden = hidden_like(body, inputs)
    if body.get("kind") == "Secret":
        hidden |= {key: Secret(body[key]) for key in ("data", "stringData") if key in body}
    return dict(hidden)


def _manager(body: dict[str, Any]) -> str:
    annotations = revealed(body)["metadata"].get("annotations") or {}
    return str(annotations.get("pulumi.com/patchFieldManager", _FIELD_MANAGER))


def _id(inputs: dict[str, Any]) -> str:
    metadata = revealed(inputs)["metadata"]
    return "/".join(part for part in (metadata.get("namespace"), metadata["name"]) if part)


def _is_patch(urn: str) -> bool:
    return urn.split("::")[2].endswith("Patch")


@contextmanager
def _told(context: Any, urn: str) -> Iterator[None]:
    try:
        yield
    except (ApiError, NeverReadyError, TimeoutError) as error:
        _refuse(context, f"{urn.rpartition('::')[2]}: {error}")


def _refuse(context: Any, message: str) -> NoReturn:
    context.abort(grpc.StatusCode.UNKNOWN, message)
    raise AssertionError
