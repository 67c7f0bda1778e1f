"""Run a Pulumi program without an engine, a provider or a network, and record the resources that it registers.

`make render` and the tests use recordings. Each registration is recorded with its inputs, its options and the paths of
its secrets. The outputs of a resource are its inputs; a command on a host prints nothing. Resources of AWS have ids and
ARNs that are made of their names, and AWS offers every type of instance that the program asks for.
"""

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from google.protobuf import empty_pb2, struct_pb2
from pulumi.runtime import config as pulumi_config
from pulumi.runtime import rpc, settings
from pulumi.runtime.proto import engine_pb2, resource_pb2
from pulumi.runtime.stack import run_in_stack

Program = Callable[[], Awaitable[None] | None]
Path = tuple[str | int, ...]

PROJECT: Final = "cloister"
_REFERENCE_TYPE: Final = "pulumi:pulumi:StackReference"
_STACK_TYPE: Final = "pulumi:pulumi:Stack"
_COMMAND_TYPE: Final = "command:remote:Command"
_OFFERINGS: Final = "aws:ec2/getInstanceTypeOfferings:getInstanceTypeOfferings"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedResource:
    """One registration of a resource.

    Attributes:
        type: Pulumi's type token, e.g. ``kubernetes:core/v1:Secret``.
        name: logical name.
        inputs: inputs of the resource, with secrets in plain text and Kubernetes' field names.
        secrets: paths of the secrets in ``inputs``, e.g. ``("stringData", "password")``.
        custom: false for components, which exist in Pulumi only.
        urn: identity within the stack.
        parent: URN of the parent; empty for the stack itself.
        provider: URN and id of the explicit provider; empty for a default provider.
        protect: Pulumi refuses to delete it.
        retain_on_delete: it stays in the cluster when Pulumi removes it from its state.
        delete_before_replace: whether a replacement deletes it first; None to let the provider decide.
        dependencies: URNs of the resources to create before it.
        ignore_changes: fields that Pulumi does not update after creation.
    """

    type: str
    name: str
    inputs: dict[str, Any]
    secrets: frozenset[Path]
    custom: bool
    urn: str
    parent: str
    provider: str
    protect: bool
    retain_on_delete: bool
    delete_before_replace: bool | None
    dependencies: tuple[str, ...]
    ignore_changes: tuple[str, ...]

    def is_secret(self, path: Path) -> bool:
        """Return whether the input at ``path``, or an object that contains it, is a Pulumi secret."""
        return any(path[: len(secret)] == secret for secret in self.secrets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Result of one run of a program.

    Attributes:
        resources: the resources in order of registration, which may differ between two runs.
        outputs: the stack's outputs, with secrets in plain text.
        secret_outputs: paths of the secrets in ``outputs``.
        messages: warnings and errors that the program logged.
    """

    resources: tuple[RecordedResource, ...]
    outputs: dict[str, Any]
    secret_outputs: frozenset[Path]
    messages: tuple[str, ...]

    def of_type(self, type_: str) -> tuple[RecordedResource, ...]:
        """Return the resources whose type token is ``type_`` or ends with ``:type_``, e.g. ``Secret``."""
        return tuple(r for r in self.resources if r.type == type_ or r.type.endswith(f":{type_}"))

    def named(self, name: str) -> RecordedResource:
        """Return the one resource, not a component, with this logical name.

        Raises:
            LookupError: no resource or several resources have this name.
        """
        found = [r for r in self.resources if r.custom and r.name == name]
        if len(found) != 1:
            raise LookupError(f"{len(found)} resources are named {name!r}, not one")
        return found[0]


@dataclass(slots=True)
class _Engine:
    """Replacement for Pulumi's engine and its resource monitor, with gRPC's method names."""

    project: str
    stack: str
    references: Mapping[str, Mapping[str, Any]]
    answers: Mapping[str, Mapping[str, Any]]
    resources: list[RecordedResource] = field(default_factory=list)
    outputs: struct_pb2.Struct = field(default_factory=struct_pb2.Struct)
    messages: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def GetDeploymentInfo(self, _request: object) -> resource_pb2.DeploymentInfo:  # noqa: N802
        # Output values are not supported, so that an input is either a plain value or a secret.
        return resource_pb2.DeploymentInfo(
            supportedFeatures=[
                resource_pb2.RESOURCE_MONITOR_FEATURE_SECRETS,
                resource_pb2.RESOURCE_MONITOR_FEATURE_RESOURCE_REFERENCES,
                resource_pb2.RESOURCE_MONITOR_FEATURE_ALIAS_SPECS,
                resource_pb2.RESOURCE_MONITOR_FEATURE_DELETED_WITH,
            ]
        )

    def RegisterResource(  # noqa: N802
        self, request: resource_pb2.RegisterResourceRequest
    ) -> resource_pb2.RegisterResourceResponse:
        is_custom = request.custom or request.remote
        inputs, secrets = _plain(request.object)
        types = request.type
        if request.parent and request.parent.split("::")[2] != _STACK_TYPE:
            types = f"{request.parent.split('::')[2]}${types}"
        urn = f"urn:pulumi:{self.stack}::{self.project}::{types}::{request.name}"
        resource_id = ""
        if is_custom:
            # The Kubernetes provider uses `namespace/name` or `name` as the id.
            metadata = inputs.get("metadata") or {}
            names = (metadata.get("namespace"), metadata.get("name", request.name))
            resource_id = "/".join(name for name in names if name)
        if request.type != _STACK_TYPE:
            resource = RecordedResource(
                type=request.type,
                name=request.name,
                inputs=inputs,
                secrets=secrets,
                custom=is_custom,
                urn=urn,
                parent=request.parent,
                provider=request.provider,
                protect=request.protect,
                retain_on_delete=request.retainOnDelete,
                delete_before_replace=request.deleteBeforeReplace if request.deleteBeforeReplaceDefined else None,
                dependencies=tuple(request.dependencies),
                ignore_changes=tuple(request.ignoreChanges),
            )
            with self._lock:
                self.resources.append(resource)
        outputs = struct_pb2.Struct()
        outputs.CopyFrom(request.object)
        if request.type == _COMMAND_TYPE:
            outputs.update({"stdout": ""})
        if request.type.startswith("aws:"):
            resource_id = f"{request.name}-id"
            outputs.update(_aws_outputs(request.type, request.name, inputs))
        return resource_pb2.RegisterResourceResponse(urn=urn, id=resource_id, object=outputs)

    def RegisterResourceOutputs(  # noqa: N802
        self, request: resource_pb2.RegisterResourceOutputsRequest
    ) -> empty_pb2.Empty:
        if request.urn.split("::")[2] == _STACK_TYPE:
            self.outputs.CopyFrom(request.outputs)
        return empty_pb2.Empty()

    def RegisterPackage(self, _request: object) -> resource_pb2.RegisterPackageResponse:  # noqa: N802
        return resource_pb2.RegisterPackageResponse(ref="package")

    def SignalAndWaitForShutdown(self, _request: object) -> empty_pb2.Empty:  # noqa: N802
        return empty_pb2.Empty()

    def Invoke(self, request: resource_pb2.ResourceInvokeRequest) -> resource_pb2.ResourceInvokeResponse:  # noqa: N802
        answer = self.answers.get(request.tok)
        if answer is None and request.tok == _OFFERINGS:
            arguments, _ = _plain(request.args)
            asked = {each["name"]: each["values"] for each in arguments["filters"]}
            answer = {"instanceTypes": asked["instance-type"], "locations": asked["location"]}
        if answer is not None:
            result = struct_pb2.Struct()
            result.update(dict(answer))
            return resource_pb2.ResourceInvokeResponse(**{"return": result})
        raise RuntimeError(f"the program calls {request.tok}, which needs a provider: only resources can be recorded")

    def ReadResource(  # noqa: N802
        self, request: resource_pb2.ReadResourceRequest
    ) -> resource_pb2.ReadResourceResponse:
        if request.type == _REFERENCE_TYPE:
            properties = struct_pb2.Struct()
            outputs = self.references.get(request.id, {})
            properties.update({"name": request.id, "outputs": dict(outputs), "secretOutputNames": []})
            return resource_pb2.ReadResourceResponse(urn=f"urn:pulumi:{request.id}", properties=properties)
        raise RuntimeError(f"the program reads {request.type} {request.id!r}, which needs a cluster")

    def Log(self, request: engine_pb2.LogRequest) -> None:  # noqa: N802
        if request.severity in {engine_pb2.WARNING, engine_pb2.ERROR}:
            self.messages.append(request.message)


def record(
    program: Program,
    *,
    config: Mapping[str, str] | None = None,
    secret_keys: frozenset[str] = frozenset(),
    stack: str = "test",
    project: str = PROJECT,
    references: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    answers: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Recording:
    """Run a program as `pulumi preview` does, and return its registrations.

    Each run has its own settings, configuration and root resource of Pulumi; none of them affects another run.

    Args:
        program: the program of a stack; it may be a coroutine function.
        config: values by full keys (``cloister:customer``); structured values as JSON.
        secret_keys: the keys of secret values.
        stack: name of the stack.
        project: name of the project.
        references: outputs of other stacks by their fully qualified names.
        answers: results of functions of providers by their tokens.

    Raises:
        Exception: the program's own errors.
    """

    def run() -> Recording:
        engine = _Engine(project=project, stack=stack, references=references, answers=answers)
        settings.reset_options(
            project=project, stack=stack, organization="organization", root_directory=".", preview=False
        )
        settings.SETTINGS.monitor = engine
        settings.SETTINGS.engine = engine
        pulumi_config.set_all_config(dict(config or {}), sorted(secret_keys))
        asyncio.run(run_program())
        outputs, secret_outputs = _plain(engine.outputs)
        return Recording(
            resources=tuple(engine.resources),
            outputs=outputs,
            secret_outputs=secret_outputs,
            messages=tuple(engine.messages),
        )

    async def run_program() -> None:
        # The first error ends the run and is raised. Futures that fail with it must not log their errors too.
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        await run_in_stack(program)

    return contextvars.copy_context().run(run)


def _aws_outputs(type_: str, name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what AWS would add to a resource: the attributes that the program reads."""
    service, kind = type_.split(":")[1].split("/")
    found: dict[str, Any] = {"arn": f"arn:aws:{service}:::{kind}/{inputs.get('name', name)}"}
    match type_.rpartition(":")[2]:
        case "Key":
            found["keyId"] = f"{name}-id"
        case "Cluster":
            authority = {"data": "Y2VydGlmaWNhdGU="}
            found |= {"endpoint": "https://cluster.eks.invalid", "certificateAuthority": authority}
        case "Repository":
            found["repositoryUrl"] = f"registry.invalid/{inputs['name']}"
        case "Instance":
            secret = {"secretArn": f"arn:aws:secretsmanager:::secret:{name}"}
            found |= {"address": "database.rds.invalid", "resourceId": "db-ID", "masterUserSecrets": [secret]}
    return found


def _plain(struct: struct_pb2.Struct) -> tuple[dict[str, Any], frozenset[Path]]:
    """Return the fields of a struct with secrets in plain text, and the paths of the secrets."""
    secrets: set[Path] = set()

    def value(given: struct_pb2.Value, path: Path) -> Any:
        kind = given.WhichOneof("kind")
        if kind == "list_value":
            return [value(item, (*path, index)) for index, item in enumerate(given.list_value.values)]
        if kind == "struct_value":
            fields = given.struct_value.fields
            signature = rpc._special_sig_key  # noqa: SLF001
            if signature not in fields:
                return {key: value(item, (*path, key)) for key, item in fields.items()}
            if fields[signature].string_value == rpc._special_secret_sig:  # noqa: SLF001
                secrets.add(path)
                return value(fields["value"], path)
            # An asset or a reference to a resource: no manifest holds one.
            return {key: item.string_value for key, item in fields.items() if key != signature}
        if kind == "number_value":
            return int(given.number_value) if given.number_value.is_integer() else given.number_value
        return None if kind == "null_value" else getattr(given, str(kind))

    fields = {key: value(item, (key,)) for key, item in struct.fields.items()}
    return fields, frozenset(secrets)


def leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value that is neither an object nor a list, with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value
