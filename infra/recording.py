"""Runs a Pulumi program without an engine, a provider or a network, and keeps what it would ask for.

`make render` and the tests look at a program through this: every registration that the engine would get is
recorded with its inputs, its options and the paths of its secrets. A resource's outputs are its inputs.
"""

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from google.protobuf import empty_pb2, struct_pb2
from pulumi.runtime import config as pulumi_config
from pulumi.runtime import rpc, settings
from pulumi.runtime.proto import engine_pb2, resource_pb2
from pulumi.runtime.stack import run_in_stack

Program = Callable[[], Awaitable[None] | None]
Path = tuple[str | int, ...]

PROJECT: Final = "cloister"
_STACK_TYPE: Final = "pulumi:pulumi:Stack"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedResource:
    """One registration of a resource.

    Attributes:
        type: Pulumi's type token, e.g. ``kubernetes:core/v1:Secret``.
        name: the logical name.
        inputs: what the program gave, with secrets in clear and Kubernetes' own names of fields.
        secrets: where the secrets stand in ``inputs``, e.g. ``("stringData", "password")``.
        custom: false for components, which exist in Pulumi only.
        urn: the identity within the stack.
        parent: the URN of the parent; empty for the stack itself.
        provider: the URN and id of the explicit provider; empty for a default provider.
        protect: Pulumi refuses to delete it.
        retain_on_delete: it stays in the cluster when Pulumi forgets it.
        dependencies: URNs of what must exist before it.
        ignore_changes: fields that Pulumi leaves as they are after creation.
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
    dependencies: tuple[str, ...]
    ignore_changes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What one run of a program asked for.

    Attributes:
        resources: in the order of registration, which may differ between two runs.
        outputs: the stack's outputs, with secrets in clear.
        secret_outputs: where the secrets stand in ``outputs``.
        messages: what the program logged as a warning or an error.
    """

    resources: tuple[RecordedResource, ...]
    outputs: dict[str, Any]
    secret_outputs: frozenset[Path]
    messages: tuple[str, ...]

    def of_type(self, type_: str) -> tuple[RecordedResource, ...]:
        """The resources whose type token is ``type_`` or ends with ``:type_``, e.g. ``Secret``."""
        return tuple(r for r in self.resources if r.type == type_ or r.type.endswith(f":{type_}"))

    def named(self, name: str) -> RecordedResource:
        """The one resource, not a component, with this logical name.

        Raises:
            LookupError: there is none, or more than one.
        """
        found = [r for r in self.resources if r.custom and r.name == name]
        if len(found) != 1:
            raise LookupError(f"{len(found)} resources are named {name!r}, not one")
        return found[0]


@dataclass(slots=True)
class _Monitor:
    """Stands in for the engine's resource monitor; the method names are gRPC's."""

    project: str
    stack: str
    resources: list[RecordedResource] = field(default_factory=list)
    outputs: struct_pb2.Struct = field(default_factory=struct_pb2.Struct)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def GetDeploymentInfo(self, _request: object) -> resource_pb2.DeploymentInfo:  # noqa: N802
        # Without output values, so that an input is a plain value or a secret and nothing else.
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
        urn = self._urn(request)
        inputs, secrets = _plain(request.object)
        resource = RecordedResource(
            type=request.type,
            name=request.name,
            inputs=inputs,
            secrets=secrets,
            custom=request.custom or request.remote,
            urn=urn,
            parent=request.parent,
            provider=request.provider,
            protect=request.protect,
            retain_on_delete=request.retainOnDelete,
            dependencies=tuple(request.dependencies),
            ignore_changes=tuple(request.ignoreChanges),
        )
        if request.type != _STACK_TYPE:
            with self._lock:
                self.resources.append(resource)
        return resource_pb2.RegisterResourceResponse(urn=urn, id=_resource_id(resource), object=request.object)

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

    def Invoke(self, request: resource_pb2.ResourceInvokeRequest) -> NoReturn:  # noqa: N802
        raise RuntimeError(f"the program calls {request.tok}, which needs a provider: only resources can be recorded")

    def ReadResource(self, request: resource_pb2.ReadResourceRequest) -> NoReturn:  # noqa: N802
        raise RuntimeError(f"the program reads {request.type} {request.id!r}, which needs a cluster")

    def _urn(self, request: resource_pb2.RegisterResourceRequest) -> str:
        types = request.type
        if request.parent and request.parent.split("::")[2] != _STACK_TYPE:
            types = f"{request.parent.split('::')[2]}${types}"
        return f"urn:pulumi:{self.stack}::{self.project}::{types}::{request.name}"


@dataclass(slots=True)
class _Engine:
    messages: list[str] = field(default_factory=list)

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
) -> Recording:
    """Runs a program as `pulumi preview` would, and gives what it registered.

    Nothing of it stays behind: each run has Pulumi's settings, configuration and root to itself.

    Args:
        program: what `pulumi up` would run; it may be a coroutine function.
        config: full keys (``cloister:customer``) with their values; structured values as JSON.
        secret_keys: which of the keys are secret.
        stack: the stack's name.
        project: the project's name.

    Raises:
        Exception: what the program itself raises.
    """
    return contextvars.copy_context().run(_run, program, dict(config or {}), secret_keys, stack, project)


def _run(program: Program, config: dict[str, str], secret_keys: frozenset[str], stack: str, project: str) -> Recording:
    monitor, engine = _Monitor(project=project, stack=stack), _Engine()
    settings.reset_options(project=project, stack=stack, organization="organization", root_directory=".", preview=False)
    settings.SETTINGS.monitor = monitor
    settings.SETTINGS.engine = engine
    pulumi_config.set_all_config(config, sorted(secret_keys))
    asyncio.run(_run_quietly(program))
    outputs, secret_outputs = _plain(monitor.outputs)
    return Recording(
        resources=tuple(monitor.resources),
        outputs=outputs,
        secret_outputs=secret_outputs,
        messages=tuple(engine.messages),
    )


async def _run_quietly(program: Program) -> None:
    # The first error ends the run and is raised; the futures that fail with it are of no interest.
    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    await run_in_stack(program)


def _resource_id(resource: RecordedResource) -> str:
    """Kubernetes' provider takes ``namespace/name`` or ``name`` as the id."""
    if not resource.custom:
        return ""
    metadata = resource.inputs.get("metadata") or {}
    return "/".join(part for part in (metadata.get("namespace"), metadata.get("name", resource.name)) if part)


def _plain(struct: struct_pb2.Struct) -> tuple[dict[str, Any], frozenset[Path]]:
    secrets: set[Path] = set()
    fields = {key: _value(value, (key,), secrets) for key, value in struct.fields.items()}
    return fields, frozenset(secrets)


def _value(value: struct_pb2.Value, path: Path, secrets: set[Path]) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        return [_value(item, (*path, index), secrets) for index, item in enumerate(value.list_value.values)]
    if kind == "struct_value":
        fields = value.struct_value.fields
        if rpc._special_sig_key not in fields:  # noqa: SLF001
            return {key: _value(item, (*path, key), secrets) for key, item in fields.items()}
        if fields[rpc._special_sig_key].string_value == rpc._special_secret_sig:  # noqa: SLF001
            secrets.add(path)
            return _value(fields["value"], path, secrets)
        # An asset or a reference to a resource: no manifest holds one.
        return {key: item.string_value for key, item in fields.items() if key != rpc._special_sig_key}  # noqa: SLF001
    if kind == "number_value":
        return int(value.number_value) if value.number_value.is_integer() else value.number_value
    return None if kind == "null_value" else getattr(value, str(kind))


def is_secret(resource: RecordedResource, path: Path) -> bool:
    """Whether the input at ``path`` is a Pulumi secret, by itself or as a part of one."""
    return any(path[: len(secret)] == secret for secret in resource.secrets)


def leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is neither an object nor a list, with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value
