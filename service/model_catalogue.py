"""The model catalogue: the models that a stack serves, how, and within which limits.

``models.yaml`` and the section ``models`` of a stack file hold the same entries, which only this module checks.
The stack file's entries are written to the ``models.yaml`` that the service's pods read.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BeforeValidator, Field, PlainSerializer, TypeAdapter, ValidationError

from ray_job.contract.accelerators import (
    ACCELERATORS,
    CPU,
    OLDEST_SUPPORTED,
    REQUIRED_CAPABILITY,
    Accelerator,
    Capability,
    capability_text,
    variant_for,
)
from ray_job.contract.cluster import GPU_RESOURCE
from ray_job.contract.job_spec import EngineKind, ModelSpec, Sharing
from ray_job.contract.lines import ENDPOINTS
from ray_job.contract.model_manifest import DIGEST
from ray_job.contract.object_keys import MODELS_PREFIX, model_prefix
from ray_job.contract.weights import MODELS_DIRECTORY
from service.config_sections import Problem, Section, Step, key, problems_of, unknown_key
from service.errors import SettingsError
from service.unsafe_engine_args import unsafe_arg_problems

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
Count = Annotated[int, Field(ge=1)]
# 15 stays 15 where entries are written to models.yaml.
_Size = Annotated[
    float, Field(gt=0, strict=False), PlainSerializer(lambda size: int(size) if size.is_integer() else size)
]

MAX_REQUESTS: Final = 50_000
_TEXT_ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions")
# Engine arguments that have a key in the catalogue, so that each is set in one place.
_OWN_KEYS: Final = MappingProxyType(
    {
        "model": "source",
        "tensor_parallel_size": "tensor_parallel_size",
        "pipeline_parallel_size": "pipeline_parallel_size",
    }
)
_FILE_KEYS: Final = ("accelerators", "models", "models_at_run_time", "prices")
# The name is also that of a node pool, and so part of labels and of pods' names.
_ACCELERATOR_NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,28}[a-z0-9])?")
_ADVICE: Final = MappingProxyType({"dtype": "Use float16.", "kv_cache_dtype": "Leave it out."})


class ModelLimits(Section):
    """The most that one batch of a model may hold."""

    max_requests: Annotated[int, Field(ge=1, le=MAX_REQUESTS)] = key(
        "lines of one input file", 1000, default=MAX_REQUESTS, unit="lines"
    )
    max_line_bytes: Count = key("length of one line", 1_048_576, default=10 * 1024 * 1024, unit="bytes")


class ModelEntry(Section):
    """A model that the stack serves."""

    id: Annotated[str, Field(min_length=1, max_length=128)] = key("the name that requests use", "llama-3.1-8b")
    source: Annotated[str, Field(min_length=1)] | None = key(
        "the directory of the model, or any name that vLLM accepts; this or `digest` is required except in the `http` "
        "engine",
        "/models/llama-3.1-8b-instruct",
        default=None,
    )
    digest: Annotated[str, Field(pattern=f"^{DIGEST.pattern}$")] | None = key(
        "instead of `source`: the digest of a model that `cloister models push` stored; jobs check each file that they "
        "load against it",
        "sha256:9f2c5a0e4b1d7c83f6a9e2b05d4c7188a3f0e6d95b2c41708e6fd3a92b5c7d10",
        default=None,
    )
    engine: EngineKind = key("what answers requests", "processor", default="direct")
    accelerator: str = key("what an engine runs on: an accelerator of the table, or `cpu`", "a10g", default="cpu")
    node_pool: Annotated[str, Field(min_length=1)] | None = key(
        "the pool of a cluster that its engines run in; without it all pools of the accelerator", "rented", default=None
    )
    weights_gib: _Size | None = key(
        "memory of the weights as the engine holds them; required on GPUs of a cluster", 15, default=None, unit="GiB"
    )
    tensor_parallel_size: Count = key("GPUs that share each layer of one engine", 4, default=1, unit="GPUs")
    pipeline_parallel_size: Count = key(
        "groups of GPUs that share the layers of one engine", 2, default=1, unit="groups"
    )
    concurrency: Count = key("engines that work at the same time", 3, default=1, unit="engines")
    batch_size: Annotated[int, Field(ge=0)] = key(
        "lines that are enough for a part object, or those of one call of an engine other than `direct`; 0 means 256 "
        "for `direct` and 64 otherwise",
        128,
        default=0,
        unit="lines",
    )
    max_concurrent_batches: Count = key(
        "calls in flight on one engine; `direct` has none and keeps its engine's window full",
        8,
        default=4,
        unit="calls",
    )
    request_timeout_s: Count = key(
        "the longest time for the answer to one line; a line that takes longer gets the error `request_timeout`",
        600,
        default=3_600,
        unit="seconds",
    )
    engine_args: dict[str, Any] = key(
        "vLLM's engine arguments by vLLM's names", {"dtype": "float16", "max_model_len": 8192}, default={}
    )
    unsafe_engine_args: Annotated[tuple[str, ...], Field(strict=False)] = key(
        "names of `engine_args` that run code, open connections or deserialize data, to acknowledge their risk",
        ["trust_remote_code"],
        default=(),
    )
    endpoints: Annotated[tuple[Endpoint, ...], Field(min_length=1, strict=False)] = key(
        "the endpoints that the model answers", ["/v1/embeddings"], default=_TEXT_ENDPOINTS
    )
    base_url: str = key(
        "the endpoint that the `http` engine calls; ends in /v1", "http://10.50.0.10:8000/v1", default=""
    )
    engine_num_cpus: Annotated[float, Field(gt=0, strict=False)] = key(
        "CPUs that one engine reserves in Ray", 2.0, default=1.0, unit="CPUs"
    )
    stage_num_cpus: Annotated[float, Field(gt=0, strict=False)] = key(
        "CPUs that one reading, preparing or writing worker reserves in Ray", 0.5, default=0.25, unit="CPUs"
    )
    sharing: Sharing = key(
        "which batches share a job and its engines: `batch` for none, `project` for a project's, `stack` for all",
        "batch",
        default="project",
    )
    keep_warm_s: Annotated[int, Field(ge=0)] = key(
        "how long a job keeps its engines ready after its last work", 300, default=30, unit="seconds"
    )
    limits: ModelLimits = key("see below", {}, default=ModelLimits())

    def catalogue_model(self, prices: "Mapping[str, PriceSection]" = MappingProxyType({})) -> "CatalogueModel":
        """Return the model as the service and its jobs use it, with the price of its accelerator."""
        own = {"endpoints", "limits", "source", "digest", "weights_gib", "unsafe_engine_args", "node_pool"}
        fields = self.model_dump(exclude=own)
        source, digest = self.source or self.id, self.digest or ""
        if digest:
            source = str(PurePosixPath(MODELS_DIRECTORY, model_prefix(digest).removeprefix(MODELS_PREFIX)))
        return CatalogueModel(
            spec=ModelSpec(source=source, digest=digest, **fields),
            endpoints=tuple(endpoint for endpoint in ENDPOINTS if endpoint in self.endpoints),
            limits=self.limits,
            weights_gib=self.weights_gib,
            unsafe_engine_args=self.unsafe_engine_args,
            node_pool=self.node_pool or "",
            price=prices.get(self.accelerator),
        )


class AcceleratorSection(Section):
    """A GPU that the built-in table lacks. A row with the name of a built-in one replaces it."""

    memory_mib: Count = key(
        "memory of one GPU as `nvidia-smi --query-gpu=memory.total --format=csv` reports it", 95_830, unit="MiB"
    )
    compute_capability: Annotated[
        str,
        BeforeValidator(lambda value: str(value) if isinstance(value, float) else value),
        Field(pattern=r"^\d{1,2}\.\d$"),
    ] = key("its CUDA compute capability, 7.0 or newer", "9.0")
    resource: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9_.-]+$")] = key(
        "the extended resource that its device plugin registers", "nvidia.com/mig-1g.12gb", default=GPU_RESOURCE
    )
    image_variant: Literal["v100", "cuda13"] | None = key(
        "the Ray image; without it `cuda13` from 7.5, `v100` below", "cuda13", default=None
    )

    def row(self, name: str) -> Accelerator:
        """Return the row of the accelerator table."""
        capability = self.capability
        return Accelerator(
            name=name,
            resource=self.resource,
            memory_mib=self.memory_mib,
            capability=capability,
            image_variant=self.image_variant or variant_for(capability),
            source=f"accelerators.{name}",
        )

    @property
    def capability(self) -> Capability:
        """``compute_capability`` as numbers."""
        major, _, minor = self.compute_capability.partition(".")
        return int(major), int(minor)


class PriceSection(Section):
    """Price of an accelerator, from which the costs of batches follow."""

    per_gpu_hour: Annotated[float, Field(ge=0, lt=1_000_000, strict=False)] = key("price of one GPU for an hour", 1.006)
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = key(
        "its ISO 4217 code, the same for all accelerators", "USD"
    )


Accelerators = dict[str, AcceleratorSection]
Prices = dict[str, PriceSection]


class ModelsAtRunTimeSection(Section):
    """Models that operators enable while the stack runs, besides those of `models`."""

    allow: bool = key(
        "let `cloister models enable` add models; otherwise `models` is the only source", True, default=False
    )
    accelerators: list[str] = key("what the engines of these models may run on", ["a10g"], default=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """One model: what the job needs (``spec``), and which endpoints it answers within which limits.

    ``weights_gib`` is the memory of its weights as the engine holds them, in GiB; None where it is unknown.
    ``unsafe_engine_args`` are the names of its engine arguments that weaken a boundary. ``node_pool`` is the pool of
    its engines on a cluster; empty for all pools of its accelerator. ``price`` is that of its accelerator.
    """

    spec: ModelSpec
    endpoints: tuple[str, ...] = _TEXT_ENDPOINTS
    limits: ModelLimits = field(default_factory=ModelLimits)
    weights_gib: float | None = None
    unsafe_engine_args: tuple[str, ...] = ()
    node_pool: str = ""
    price: PriceSection | None = None

    @property
    def id(self) -> str:
        """The name that requests use."""
        return self.spec.id


# All models by id, in the order of the file.
Catalogue = Mapping[str, CatalogueModel]


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueFile:
    """Content of a catalogue file: models by id, the accelerator table, which models may be added, and prices."""

    models: Catalogue
    accelerators: Mapping[str, Accelerator]
    at_run_time: ModelsAtRunTimeSection = field(default_factory=ModelsAtRunTimeSection)
    prices: "Prices" = field(default_factory=dict)


def load_catalogue(path: Path | str) -> Catalogue:
    """Read the models of a catalogue file.

    Raises:
        SettingsError: see ``load_catalogue_file``.
    """
    return load_catalogue_file(path).models


def load_catalogue_file(path: Path | str) -> CatalogueFile:
    """Read a catalogue file.

    Raises:
        SettingsError: the file is unreadable or wrong; the message lists every error with its path.
    """
    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(
            f"cannot read the model catalogue {path}: {error.strerror}. Set CLOISTER_MODELS to a models.yaml"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"the model catalogue {path} is not YAML: {error}") from error
    return parse_catalogue_file(raw, name=str(path))


def parse_catalogue(raw: Any) -> Catalogue:
    """Check a catalogue that a YAML parser has read, and return its models.

    Raises:
        SettingsError: see ``load_catalogue_file``.
    """
    return parse_catalogue_file(raw).models


def parse_catalogue_file(raw: Any, *, name: str = "models.yaml") -> CatalogueFile:
    """Check a catalogue that a YAML parser has read.

    Args:
        raw: the content.
        name: the file's name in messages.

    Raises:
        SettingsError: see ``load_catalogue_file``.
    """
    if not isinstance(raw, Mapping):
        raise SettingsError(f"the model catalogue {name} is wrong: it must be a mapping with the key models")
    problems = [
        Problem(path=(str(found),), message=unknown_key(str(found), list(_FILE_KEYS)))
        for found in raw
        if found not in _FILE_KEYS
    ]
    own, wrong_accelerators = parse_accelerators(raw.get("accelerators", {}))
    accelerators = accelerator_table(own)
    entries, wrong_models = parse_models(raw.get("models"), accelerators)
    at_run_time, wrong_at_run_time = parse_models_at_run_time(raw.get("models_at_run_time", {}), accelerators)
    prices, wrong_prices = parse_prices(raw.get("prices", {}), accelerators)
    problems += [*wrong_accelerators, *wrong_models, *wrong_at_run_time, *wrong_prices]
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise SettingsError(f"the model catalogue {name} is wrong:{lines}")
    models = MappingProxyType({entry.id: entry.catalogue_model(prices) for entry in entries.values()})
    return CatalogueFile(models=models, accelerators=accelerators, at_run_time=at_run_time, prices=prices)


def parse_models_at_run_time(
    raw: Any, accelerators: Mapping[str, Accelerator]
) -> tuple[ModelsAtRunTimeSection, list[Problem]]:
    """Check the section ``models_at_run_time``. Return it, or one that allows no models, and what is wrong."""
    try:
        section = ModelsAtRunTimeSection.model_validate(raw)
    except ValidationError as error:
        return ModelsAtRunTimeSection(), problems_of(error, ModelsAtRunTimeSection, raw, at=("models_at_run_time",))
    return section, models_at_run_time_problems(section, accelerators)


def models_at_run_time_problems(
    section: ModelsAtRunTimeSection, accelerators: Mapping[str, Accelerator]
) -> list[Problem]:
    """Return what contradicts the table of accelerators in the section ``models_at_run_time``."""
    at: tuple[Step, ...] = ("models_at_run_time", "accelerators")
    problems = [
        Problem(path=(*at, index), message=unknown_key(name, list(accelerators), kind="accelerator"))
        for index, name in enumerate(section.accelerators)
        if name not in accelerators
    ]
    if section.allow and not section.accelerators:
        problems.append(Problem(path=at, message="is required with allow: true: what these models may run on"))
    return problems


def parse_accelerators(raw: Any) -> tuple[Accelerators, list[Problem]]:
    """Check the section ``accelerators``. Wrong rows are left out of the result.

    Returns:
        The valid rows by name, and what is wrong.
    """
    if not isinstance(raw, Mapping):
        return {}, [Problem(path=("accelerators",), message=f"must be a mapping of names to rows, not {raw!r}")]
    valid: Accelerators = {}
    problems: list[Problem] = []
    for name, row in raw.items():
        at: tuple[Step, ...] = ("accelerators", str(name))
        if str(name) in ("cpu", "system") or not _ACCELERATOR_NAME.fullmatch(str(name)):
            message = "is not a usable name: lower case letters, digits and hyphens, at most 30; not cpu or system"
            problems.append(Problem(path=at, message=message))
            continue
        try:
            section = AcceleratorSection.model_validate(row)
        except ValidationError as error:
            problems += problems_of(error, AcceleratorSection, row, at=at)
            continue
        if section.capability < OLDEST_SUPPORTED:
            oldest = capability_text(OLDEST_SUPPORTED)
            message = f"must be at least {oldest}, the oldest GPU with an image, not {section.compute_capability}"
            problems.append(Problem(path=(*at, "compute_capability"), message=message))
            continue
        valid[str(name)] = section
    return valid, problems


def accelerator_table(own: Mapping[str, AcceleratorSection]) -> dict[str, Accelerator]:
    """Return the built-in accelerators together with a file's own."""
    return {**ACCELERATORS, **{name: section.row(name) for name, section in own.items()}}


def parse_models(raw: Any, accelerators: Mapping[str, Accelerator]) -> tuple[dict[int, ModelEntry], list[Problem]]:
    """Check the section ``models``, each entry once.

    Args:
        raw: the list of entries as a YAML parser read it.
        accelerators: the known accelerators by name.

    Returns:
        The valid entries by index, and what is wrong with the others.
    """
    if not isinstance(raw, list) or not raw:
        return {}, [Problem(path=("models",), message="must be a list of at least one model")]
    valid: dict[int, ModelEntry] = {}
    problems: list[Problem] = []
    first: dict[str, int] = {}
    for index, value in enumerate(raw):
        at: tuple[Step, ...] = ("models", index)
        try:
            entry = ModelEntry.model_validate(value)
        except ValidationError as error:
            problems += problems_of(error, ModelEntry, value, at=at)
            continue
        found = [Problem(path=(*at, *path), message=message) for path, message in _entry_problems(entry, accelerators)]
        if first.setdefault(entry.id, index) != index:
            message = f"{entry.id!r} is the id of models[{first[entry.id]}] too; ids must be unique"
            found.append(Problem(path=(*at, "id"), message=message))
        problems += found
        if not found:
            valid[index] = entry
    return valid, problems


def parse_prices(raw: Any, accelerators: Mapping[str, Accelerator]) -> tuple[Prices, list[Problem]]:
    """Check the section ``prices``.

    Args:
        raw: prices by accelerator as a YAML parser read them.
        accelerators: the known accelerators by name.

    Returns:
        The prices, without any if one is wrong, and what is wrong.
    """
    try:
        prices = TypeAdapter(Prices).validate_python(raw)
    except ValidationError as error:
        return {}, problems_of(error, Prices, raw, at=("prices",))
    problems = list(price_problems(prices, accelerators))
    return {} if problems else prices, problems


def price_problems(prices: Prices, accelerators: Mapping[str, Accelerator]) -> Iterator[Problem]:
    """Yield the prices of accelerators that do not exist or have no GPU, and currencies that differ from the first."""
    gpus = [name for name in accelerators if name != CPU.name]
    first = next(iter(prices.values()), None)
    for name, price in prices.items():
        if name not in gpus:
            yield Problem(path=("prices", name), message=unknown_key(name, gpus, kind="accelerator"))
        if first and price.currency != first.currency:
            message = f"must be {first.currency} as for the others, not {price.currency}; convert the price"
            yield Problem(path=("prices", name, "currency"), message=message)


def catalogue_yaml(
    entries: Mapping[int, ModelEntry],
    own: Mapping[str, AcceleratorSection],
    prices: Mapping[str, PriceSection] = MappingProxyType({}),
    at_run_time: ModelsAtRunTimeSection | None = None,
) -> str:
    """Write ``models.yaml``: the keys that the entries set, and the accelerators that the built-in table lacks.

    Args:
        entries: the models by index.
        own: the accelerators that the built-in table lacks.
        prices: prices by accelerator.
        at_run_time: which models operators may add.
    """
    content: dict[str, Any] = {"models": [entry.model_dump(exclude_unset=True) for entry in entries.values()]}
    if own:
        content["accelerators"] = {name: section.model_dump(exclude_unset=True) for name, section in own.items()}
    if prices:
        content["prices"] = {name: section.model_dump() for name, section in prices.items()}
    if at_run_time and at_run_time.allow:
        content["models_at_run_time"] = {"allow": True, "accelerators": list(at_run_time.accelerators)}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _entry_problems(
    entry: ModelEntry, accelerators: Mapping[str, Accelerator]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Check the rules between the keys of an entry; yield path and message."""
    if entry.engine == "http":
        if not entry.base_url.startswith(("http://", "https://")) or not entry.base_url.endswith("/v1"):
            yield (
                ("base_url",),
                "the http engine needs the URL of an endpoint that ends in /v1, e.g. http://host:8000/v1",
            )
        if entry.digest:
            yield ("digest",), "the http engine loads no model: its endpoint does; leave it out"
    else:
        if entry.source is None and entry.digest is None:
            yield ("source",), "is required: a directory or any model id that vLLM accepts; or set digest"
        elif entry.source and entry.digest:
            yield ("digest",), "names the model, and so does source; set one of them"
        if entry.base_url:
            yield ("base_url",), f"belongs to the http engine only, this is engine {entry.engine}"
    arguments = {name.replace("-", "_"): value for name, value in entry.engine_args.items()}
    for name, own_key in _OWN_KEYS.items():
        if name in arguments:
            yield ("engine_args", name), f"set {own_key} of the model instead"
    yield from unsafe_arg_problems(entry.engine_args, entry.unsafe_engine_args)
    accelerator = accelerators.get(entry.accelerator)
    if accelerator is None:
        yield ("accelerator",), unknown_key(entry.accelerator, list(accelerators), kind="accelerator")
        return
    for name in REQUIRED_CAPABILITY.keys() & arguments.keys():
        value = str(arguments[name])
        if needed := accelerator.missing_capability(name, value):
            advice = _ADVICE.get(name) or f"Use one of {', '.join(accelerator.quantizations)}, or unquantized weights."
            has = capability_text(accelerator.capability or OLDEST_SUPPORTED)
            message = (
                f"{value} needs compute capability {capability_text(needed)}; {accelerator.name} has {has}. {advice}"
            )
            yield ("engine_args", name), message
