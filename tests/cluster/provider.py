"""Stand-in for the `kubernetes` provider, for machines without the binary `pulumi-resource-kubernetes`.

It connects Pulumi's real engine to a real API server and speaks Pulumi's provider protocol. It follows version 4.34 of
the real provider (https://github.com/pulumi/pulumi-kubernetes, provider/pkg/await and provider/pkg/provider):

- Create posts the object as the field manager ``pulumi-kubernetes`` and fails if the object exists. A provider with
  ``upsertExistingObjects``, and every Patch resource, uses server-side apply instead.
- Update uses server-side apply under the object's own field manager, a random name in the state. Before the first
  update it takes over what Create and kubectl own. A field that somebody else owns with another value is a conflict;
  the annotation ``pulumi.com/patchForce`` or the provider's ``enablePatchForce`` resolves it.
- A preview is a dry run. It forces conflicts on an object that has not been updated since its creation, so that such a
  conflict appears in `up` only. A create that would fail because the object exists is previewed as a create.
- A change of a field in ``_REPLACING`` replaces the object: deleted first, unless the program's options say otherwise.
- An object that does not become ready is in the state, and the next `up` waits for it again.

Limits, compared with the real provider:

- Only a provider with ``is_waiting`` waits for Jobs, Deployments, StatefulSets, Services and volume claims
  (``readiness.py``). Otherwise the stand-in waits for deletions only: without a kubelet nothing becomes ready.
- Helm charts, invokes, lists and generated names are errors.
- A kubeconfig is a file whose user has a token.
- Of the annotations ``pulumi.com/*`` it obeys patchFieldManager, patchForce, skipAwait and deletionPropagationPolicy.
- A diff compares old and new inputs; the real provider compares new inputs with the last live object. A refresh finds
  drift by a dry run of the inputs.
- A changed kubeconfig never replaces the provider, as with an unchanged ``clusterIdentifier``.
"""

import json
import logging
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc
from google.protobuf import any_pb2, empty_pb2
from google.rpc import status_pb2
from pulumi.runtime.proto import plugin_pb2, provider_pb2, provider_pb2_grpc

from tests.cluster.api import ApiError, JsonObject, KubernetesApi, UnknownKindError
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
_CREATOR: Final = "pulumi-kubernetes"
# Field managers whose fields the first update takes over, with their kind of operation.
_TAKEN_OVER: Final = {
    (_CREATOR, "Update"),
    ("kubectl", "Apply"),
    ("kubectl", "Update"),
    ("before-first-apply", "Update"),
}
_FIELD_MANAGER_KEY: Final = "__fieldManager"
_IDENTITY: Final = ("metadata.name", "metadata.namespace")
# forceNew in provider/pkg/provider/diff.go, for the kinds that the project uses.
_REPLACING: Final = {
    "ClusterRoleBinding": ("roleRef",),
    "Deployment": ("spec.selector",),
    "Job": ("spec.completions", "spec.parallelism", "spec.selector", "spec.template"),
    "PersistentVolumeClaim": ("spec.accessModes", "spec.selector", "spec.storageClassName", "spec.volumeName"),
    "ResourceQuota": ("spec.scopes",),
    "RoleBinding": ("roleRef",),
    "Secret": ("type",),
    "Service": ("spec.clusterIP",),
    "StatefulSet": (
        "spec.podManagementPolicy",
        "spec.revisionHistoryLimit",
        "spec.selector",
        "spec.serviceName",
        "spec.volumeClaimTemplates",
    ),
    "StorageClass": ("parameters", "provisioner"),
}
# Replaced as a whole unless the provider enables changes in place.
_MUTABLE_IF_ENABLED: Final = {
    "ConfigMap": ("enableConfigMapMutable", ("binaryData", "data")),
    "Secret": ("enableSecretMutable", ("data", "stringData")),
}
_SERVER_METADATA: Final = ("creationTimestamp", "generation", "managedFields", "resourceVersion", "uid")
_PROPERTY_DIFFS: Final = {"add": "ADD", "delete": "DELETE", "update": "UPDATE"}
_DELETION_S: Final = 600.0
_READY_S: Final = 600.0
_NOT_FOUND: Final = 404
_CONFLICT: Final = 409
_ALREADY_EXISTS: Final = (
    "The resource already exists in the cluster. To adopt it, set upsertExistingObjects on the provider."
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Configuration:
    """Inputs of one provider resource of the program."""

    api: KubernetesApi
    flags: frozenset[str]


class StandInProvider(provider_pb2_grpc.ResourceProviderServicer):
    """Methods of the protocol, under gRPC's names.

    The engine opens one connection for each provider resource of the program, and all of them reach this object. The
    connection identifies the provider resource of a request.

    Attributes:
        warnings: warnings of the API server, with the object's kind and name.

    Args:
        is_waiting: wait until created and updated objects are ready.
    """

    def __init__(self, *, is_waiting: bool = False) -> None:
        self.warnings: list[str] = []
        self._is_waiting = is_waiting
        self._lock = threading.Lock()
        self._apis: dict[str, KubernetesApi] = {}
        self._configurations: dict[str, _Configuration] = {}

    def close(self) -> None:
        """Close the connections to API servers."""
        for api in self._apis.values():
            api.close()

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

    def Configure(self, request: Any, context: Any) -> Any:  # noqa: N802
        arguments = revealed(from_struct(request.args))
        if path := arguments.get("kubeconfig"):
            with self._lock:
                if path not in self._apis:
                    self._apis[path] = KubernetesApi(Path(path))
                # A provider's inputs arrive as strings.
                flags = frozenset(key for key, value in arguments.items() if value in (True, "true"))
                self._configurations[context.peer()] = _Configuration(api=self._apis[path], flags=flags)
        return provider_pb2.ConfigureResponse(
            acceptSecrets=True, supportsPreview=True, acceptResources=False, acceptOutputs=False
        )

    def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        inputs = revealed(from_struct(request.news))
        if "apiVersion" not in inputs or not (inputs.get("metadata") or {}).get("name"):
            _fail(context, f"{request.urn}: the stand-in supports Kubernetes objects with a name only, no charts")
        return provider_pb2.CheckResponse(inputs=request.news)

    def Diff(self, request: Any, context: Any) -> Any:  # noqa: N802
        old, new = revealed(from_struct(request.old_inputs)), revealed(from_struct(request.news))
        replacing = _IDENTITY
        if not _is_patch(request.urn):
            replacing += _REPLACING.get(new["kind"], ())
            flag, fields = _MUTABLE_IF_ENABLED.get(new["kind"], ("", ()))
            with _reported_errors(context, request.urn):
                replacing += fields if flag not in self._configuration(context).flags else ()
        return _diff(differences(old, new), replacing)

    def Create(self, request: Any, context: Any) -> Any:  # noqa: N802
        inputs = from_struct(request.properties)
        body = revealed(inputs)
        manager = _field_manager(body, {}) or f"{_CREATOR}-{secrets.token_hex(4)}"
        with _reported_errors(context, request.urn):
            configuration = self._configuration(context)
            live = self._create(configuration, request, body, manager)
            outputs = to_struct(_outputs(live, inputs, manager))
            if not request.preview:
                self._wait(configuration.api, request, context, inputs, outputs)
        return provider_pb2.CreateResponse(id="" if request.preview else _id(body), properties=outputs)

    def Update(self, request: Any, context: Any) -> Any:  # noqa: N802
        inputs = from_struct(request.news)
        with _reported_errors(context, request.urn):
            configuration = self._configuration(context)
            live = _find(configuration.api, revealed(inputs))
            _keep_live_values(inputs, live, list(request.ignoreChanges))
            body = revealed(inputs)
            manager = _field_manager(body, revealed(from_struct(request.olds)))
            if not (request.preview and (live is None or has_unknown(body))):
                live = self._update(configuration, request, body, manager, live)
            outputs = to_struct(_outputs(live or body, inputs, manager))
            if not request.preview:
                self._wait(configuration.api, request, context, inputs, outputs)
        return provider_pb2.UpdateResponse(properties=outputs)

    def Read(self, request: Any, context: Any) -> Any:  # noqa: N802
        inputs = from_struct(request.inputs)
        is_import = "apiVersion" not in inputs
        if is_import:
            inputs = _identity(request.urn, request.id)
        body = revealed(inputs)
        with _reported_errors(context, request.urn):
            api = self._configuration(context).api
            live = _find(api, body)
            if live is None:
                return provider_pb2.ReadResponse()
            manager = _field_manager(body, revealed(from_struct(request.properties)))
            if is_import:
                metadata = {key: value for key, value in live["metadata"].items() if key not in _SERVER_METADATA}
                inputs = {key: value for key, value in live.items() if key != "status"} | {"metadata": metadata}
            else:
                inputs = _drifted(api, inputs, live, manager)
        outputs = _outputs(live, inputs, manager or f"{_CREATOR}-{secrets.token_hex(4)}")
        return provider_pb2.ReadResponse(id=request.id, inputs=to_struct(inputs), properties=to_struct(outputs))

    def Delete(self, request: Any, context: Any) -> Any:  # noqa: N802
        inputs = revealed(from_struct(request.old_inputs))
        metadata = inputs["metadata"]
        place = (inputs["apiVersion"], inputs["kind"], metadata["name"], metadata.get("namespace", ""))
        with _reported_errors(context, request.urn):
            api = self._configuration(context).api
            if _is_patch(request.urn):
                # Applying an object without fields gives up the fields that the manager owned.
                identity = {key: metadata[key] for key in ("name", "namespace") if key in metadata}
                bare = {key: inputs[key] for key in ("apiVersion", "kind")} | {"metadata": identity}
                api.apply(bare, field_manager=_field_manager(inputs, revealed(from_struct(request.properties))))
            else:
                policy = (metadata.get("annotations") or {}).get("pulumi.com/deletionPropagationPolicy", "background")
                api.delete(*place, propagation=policy.capitalize())
                api.wait_until_gone(*place, within_s=request.timeout or _DELETION_S)
        return empty_pb2.Empty()

    def _configuration(self, context: Any) -> _Configuration:
        configuration = self._configurations.get(context.peer())
        if configuration is None:
            raise ApiError(0, "the provider has no kubeconfig")
        return configuration

    def _create(self, configuration: _Configuration, request: Any, body: JsonObject, manager: str) -> JsonObject:
        api, is_patch = configuration.api, _is_patch(request.urn)
        if request.preview and (is_patch or has_unknown(body) or not api.knows(body["apiVersion"], body["kind"])):
            return body
        if is_patch and _find(api, body) is None:
            raise ApiError(_NOT_FOUND, f"{body['kind']} {body['metadata']['name']} to patch does not exist")
        try:
            if is_patch or "upsertExistingObjects" in configuration.flags:
                force = request.preview or _is_forced(configuration, body)
                answer = api.apply(body, field_manager=manager, force=force, dry_run=request.preview)
            else:
                answer = api.create(body, field_manager=_CREATOR, dry_run=request.preview)
        except ApiError as error:
            # The namespace of a previewed object may not exist yet.
            if request.preview and (error.status == _NOT_FOUND or error.reason == "AlreadyExists"):
                return body
            if error.reason == "AlreadyExists":
                raise ApiError(error.status, f"{error.message}\n\n{_ALREADY_EXISTS}") from error
            raise
        if not request.preview:
            title = f"{body['kind']} {body['metadata']['name']}"
            self.warnings += [f"{title}: {warning}" for warning in answer.warnings]
        return answer.body

    def _update(
        self, configuration: _Configuration, request: Any, body: JsonObject, manager: str, live: JsonObject | None
    ) -> JsonObject:
        if live is None:
            raise ApiError(_NOT_FOUND, f"{body['kind']} {body['metadata']['name']} does not exist any more; refresh")
        api, force = configuration.api, _is_forced(configuration, body)
        if request.preview:
            managers = {(each["manager"], each["operation"]) for each in live["metadata"].get("managedFields", ())}
            force = force or (_CREATOR, "Update") in managers
        elif not _is_patch(request.urn):
            _take_over_fields(api, live, manager)
        answer = api.apply(body, field_manager=manager, force=force, dry_run=request.preview)
        if not request.preview:
            title = f"{body['kind']} {body['metadata']['name']}"
            self.warnings += [f"{title}: {warning}" for warning in answer.warnings]
        return answer.body

    def _wait(self, api: KubernetesApi, request: Any, context: Any, inputs: JsonObject, outputs: Any) -> None:
        """Wait until the object is ready, and update its outputs.

        An object that does not become ready is reported to the engine together with its outputs, so that it is in the
        state and the next `up` waits for it again.
        """
        if not self._is_waiting:
            return
        try:
            live = wait_until_ready(api, revealed(inputs), within_s=request.timeout or _READY_S)
        except (NeverReadyError, TimeoutError) as error:
            message = f"{request.urn.rpartition('::')[2]}: {error}"
            failure = provider_pb2.ErrorResourceInitFailed(
                id=_id(revealed(inputs)), properties=outputs, reasons=[message], inputs=to_struct(inputs)
            )
            detail = any_pb2.Any()
            detail.Pack(failure)
            status = status_pb2.Status(code=grpc.StatusCode.UNKNOWN.value[0], message=message, details=[detail])
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
            _fail(context, message)
        manager = outputs[_FIELD_MANAGER_KEY]
        outputs.CopyFrom(to_struct(_outputs(live, inputs, manager)))


@contextmanager
def stand_in_provider(*, is_waiting: bool = False) -> Iterator[tuple[StandInProvider, int]]:
    """Serve the stand-in; yield it and its port, for ``PULUMI_DEBUG_PROVIDERS=kubernetes:<port>``."""
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


def _find(api: KubernetesApi, body: JsonObject) -> JsonObject | None:
    metadata = body["metadata"]
    try:
        return api.find(body["apiVersion"], body["kind"], metadata["name"], metadata.get("namespace", ""))
    except UnknownKindError:
        return None


def _take_over_fields(api: KubernetesApi, live: JsonObject, manager: str) -> None:
    """Give the fields that Create and kubectl own to the object's field manager."""
    entries = live["metadata"].get("managedFields", [])
    own = [each for each in entries if (each["manager"], each["operation"]) in {*_TAKEN_OVER, (manager, "Apply")}]
    own = [each for each in own if "subresource" not in each]
    if all(each["manager"] == manager for each in own):
        return
    fields: JsonObject = {}
    for each in own:
        fields = _merged(fields, each["fieldsV1"])
    merged = own[0] | {"manager": manager, "operation": "Apply", "fieldsV1": fields}
    api.replace_managed_fields(live, [merged, *(each for each in entries if each not in own)])


def _merged(first: JsonObject, second: JsonObject) -> JsonObject:
    """Union of two sets of managed fields, which are nested objects with empty leaves."""
    return first | {key: _merged(first.get(key, {}), value) for key, value in second.items()}


def _drifted(api: KubernetesApi, inputs: JsonObject, live: JsonObject, manager: str) -> JsonObject:
    """Inputs with the live value wherever applying the inputs would change the object."""
    body = revealed(inputs)
    wanted = api.apply(body, field_manager=manager or _CREATOR, force=True, dry_run=True).body
    found = dict(inputs)
    for part in body.keys() - {"apiVersion", "kind", "metadata", "stringData"}:
        if differences(wanted.get(part), live.get(part)):
            found[part] = hidden_like(_restricted(live.get(part), body[part]), inputs[part])
    if "stringData" in body and differences(wanted.get("data"), live.get("data")):
        found["stringData"] = Secret({"changed outside of Pulumi": "true"})
    return found | {"metadata": _restricted(live["metadata"], body["metadata"])}


def _restricted(live: Any, wanted: Any) -> Any:
    """Fields of ``live`` that ``wanted`` has too, and empty fields of ``wanted``, which the API server omits."""
    if isinstance(live, dict) and isinstance(wanted, dict):
        empty = {key: value for key, value in wanted.items() if key not in live and not value}
        return {key: _restricted(live[key], wanted[key]) for key in wanted if key in live} | empty
    if isinstance(live, list) and isinstance(wanted, list) and len(live) == len(wanted):
        return [_restricted(a, b) for a, b in zip(live, wanted, strict=True)]
    return live


def _keep_live_values(inputs: JsonObject, live: JsonObject | None, ignored: list[str]) -> None:
    """Put live values where the program ignores changes: others own those fields."""
    for path in ignored:
        *parents, last = path.split(".")
        target, source = inputs, live or {}
        for parent in parents:
            target, source = target[parent], source.get(parent, {})
        if last in source:
            target[last] = source[last]


def _diff(changes: dict[str, str], replacing: tuple[str, ...]) -> Any:
    replaces = [
        path
        for path in changes
        if any(path == fixed or path.startswith((f"{fixed}.", f"{fixed}[")) for fixed in replacing)
    ]
    detailed = {}
    for path, change in changes.items():
        kind = _PROPERTY_DIFFS[change] + ("_REPLACE" if path in replaces else "")
        detailed[path] = provider_pb2.PropertyDiff(kind=kind, inputDiff=True)
    response = provider_pb2.DiffResponse
    return provider_pb2.DiffResponse(
        changes=response.DIFF_SOME if changes else response.DIFF_NONE,
        diffs=sorted({path.split(".")[0].split("[")[0] for path in changes}),
        replaces=replaces,
        detailedDiff=detailed,
        hasDetailedDiff=True,
        # Two objects cannot have one name.
        deleteBeforeReplace=bool(replaces) and not any(path in _IDENTITY for path in replaces),
    )


def _outputs(live: JsonObject, inputs: JsonObject, manager: str) -> JsonObject:
    body = json.loads(json.dumps(live))
    (body.get("metadata") or {}).pop("managedFields", None)
    hidden = hidden_like(body, inputs)
    if body.get("kind") == "Secret":
        hidden |= {key: Secret(body[key]) for key in ("data", "stringData") if key in body}
    return {**hidden, _FIELD_MANAGER_KEY: manager}


def _field_manager(body: JsonObject, state: JsonObject) -> str:
    """Field manager that the object's annotation names, or else its state; empty for an object without a state."""
    annotations = body["metadata"].get("annotations") or {}
    return str(annotations.get("pulumi.com/patchFieldManager") or state.get(_FIELD_MANAGER_KEY, ""))


def _is_forced(configuration: _Configuration, body: JsonObject) -> bool:
    annotations = body["metadata"].get("annotations") or {}
    return "enablePatchForce" in configuration.flags or annotations.get("pulumi.com/patchForce") == "true"


def _id(body: JsonObject) -> str:
    metadata = body["metadata"]
    return "/".join(part for part in (metadata.get("namespace"), metadata["name"]) if part)


def _identity(urn: str, resource_id: str) -> JsonObject:
    """Identity of an imported object: its type token is ``kubernetes:apps/v1:Deployment``, its id namespace/name."""
    _, api_version, kind = urn.split("::")[2].rpartition("$")[2].split(":")
    namespace, _, name = resource_id.rpartition("/")
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": api_version.removeprefix("core/"), "kind": kind, "metadata": metadata}


def _is_patch(urn: str) -> bool:
    return urn.split("::")[2].endswith("Patch")


@contextmanager
def _reported_errors(context: Any, urn: str) -> Iterator[None]:
    """Report errors of the API server to the engine, with the resource's name."""
    name = urn.rpartition("::")[2]
    try:
        yield
    except (ApiError, TimeoutError) as error:
        if isinstance(error, ApiError) and error.status == _CONFLICT and error.reason == "Conflict":
            _fail(context, f"{name}: server-side apply field conflict detected: {error}")
        _fail(context, f"{name}: {error}")


def _fail(context: Any, message: str) -> NoReturn:
    context.abort(grpc.StatusCode.UNKNOWN, message)
    raise AssertionError
