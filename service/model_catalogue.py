"""The model catalogue, ``models.yaml``: the models that a stack serves, how, and within which limits."""

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from ray_job.contract.job_spec import Accelerator, EngineLane, ModelSpec
from ray_job.contract.lines import ENDPOINTS
from service.errors import SettingsError

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]

MAX_REQUESTS: Final = 50_000
_TEXT_ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions")
# Engine arguments that the catalogue has a key of its own for, so that there is one place for each.
_OWN_KEYS: Final = ("model", "tensor_parallel_size", "pipeline_parallel_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The most that one batch of a model may hold: requests, and bytes of one line."""

    max_requests: int = MAX_REQUESTS
    max_line_bytes: int = 10 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """One model: what the job needs (``spec``), and which endpoints it answers within which limits.

    ``weights_gib`` is the memory of its weights as the engine holds them, in GiB; None where nobody has said.
    """

    spec: ModelSpec
    endpoints: tuple[str, ...] = _TEXT_ENDPOINTS
    limits: ModelLimits = ModelLimits()
    weights_gib: float | None = None

    @property
    def id(self) -> str:
        """The name that requests use."""
        return self.spec.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All models, by id, in the order of the file."""

    models: Mapping[str, CatalogueModel] = field(default_factory=lambda: MappingProxyType({}))


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


_Count = Annotated[int, Field(ge=1)]


class _Limits(_Strict):
    max_requests: Annotated[int, Field(ge=1, le=MAX_REQUESTS)] = MAX_REQUESTS
    max_line_bytes: Annotated[int, Field(ge=1)] = ModelLimits().max_line_bytes


class _Model(_Strict):
    id: Annotated[str, Field(min_length=1, max_length=128)]
    source: Annotated[str, Field(min_length=1)] | None = None
    lane: EngineLane = "direct"
    accelerator: Accelerator = "cpu"
    endpoints: Annotated[tuple[Endpoint, ...], Field(min_length=1, strict=False)] = _TEXT_ENDPOINTS
    engine_args: dict[str, Any] = {}
    tensor_parallel_size: _Count = 1
    pipeline_parallel_size: _Count = 1
    concurrency: _Count = 1
    batch_size: _Count = 64
    max_concurrent_batches: _Count = 4
    engine_num_cpus: Annotated[float, Field(gt=0, strict=False)] = 1.0
    stage_num_cpus: Annotated[float, Field(gt=0, strict=False)] = 0.25
    base_url: str = ""
    weights_gib: Annotated[float, Field(gt=0, strict=False)] | None = None
    limits: _Limits = _Limits()


class _File(_Strict):
    models: Annotated[list[_Model], Field(min_length=1)]


def load_catalogue(path: Path | str) -> Catalogue:
    """Reads a catalogue file.

    Raises:
        SettingsError: the file cannot be read or is wrong; the message lists every error with its path.
    """
    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(
            f"cannot read the model catalogue {path}: {error.strerror}. Set CLOISTER_MODELS to a models.yaml"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"the model catalogue {path} is not YAML: {error}") from error
    return parse_catalogue(raw, name=str(path))


def parse_catalogue(raw: Any, *, name: str = "models.yaml") -> Catalogue:
    """Makes a catalogue of what a YAML parser read; ``name`` is the file's name in messages.

    Raises:
        SettingsError: see ``load_catalogue``.
    """
    try:
        parsed = _File.model_validate(raw)
    except ValidationError as error:
        # The rules between fields are told together with the rest, for each model whose own fields are right.
        rules = _rule_errors(_valid_models(raw))
        raise _settings_error(name, [*map(_described, error.errors()), *rules]) from error
    if errors := list(_rule_errors(dict(enumerate(parsed.models)))):
        raise _settings_error(name, errors)
    return Catalogue(models=MappingProxyType({model.id: _catalogue_model(model) for model in parsed.models}))


def _settings_error(name: str, errors: Iterable[str]) -> SettingsError:
    lines = "".join(f"\n  {error}" for error in errors)
    return SettingsError(f"the model catalogue {name} is wrong:{lines}")


def _valid_models(raw: Any) -> dict[int, _Model]:
    models = raw.get("models") if isinstance(raw, dict) else None
    valid: dict[int, _Model] = {}
    for index, model in enumerate(models if isinstance(models, list) else []):
        try:
            valid[index] = _Model.model_validate(model)
        except ValidationError:
            continue  # its errors are told already
    return valid


def _described(error: ErrorDetails) -> str:
    path = _path(error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{path}: there is no such key; {_nearest(str(error['loc'][-1]), _keys_at(error['loc']))}"
    if error["type"] in ("model_type", "model_attributes_type"):
        return f"{path or 'the file'}: must be a mapping of keys to values"
    if error["type"] == "missing":
        return f"{path}: is required"
    return f"{path}: {error['msg'][:1].lower()}{error['msg'][1:]}, not {str(error['input'])[:80]!r}"


def _path(location: tuple[int | str, ...]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location).removeprefix(".")


def _keys_at(location: tuple[int | str, ...]) -> list[str]:
    owners: dict[int, type[BaseModel]] = {1: _File, 3: _Model}
    return list(owners.get(len(location), _Limits).model_fields)


def _nearest(key: str, valid: list[str]) -> str:
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(valid)}"


def _rule_errors(models: Mapping[int, _Model]) -> Iterator[str]:
    times = Counter(model.id for model in models.values())
    for index, model in models.items():
        path = f"models[{index}]"
        if times[model.id] > 1:
            yield f"{path}.id: {model.id!r} stands there {times[model.id]} times; ids must be unique"
        yield from _source_errors(path, model)
        yield from _engine_argument_errors(path, model)


def _source_errors(path: str, model: _Model) -> Iterator[str]:
    if model.lane == "http":
        if not model.base_url.startswith(("http://", "https://")) or not model.base_url.endswith("/v1"):
            yield f"{path}.base_url: the http lane needs the URL of an endpoint that ends in /v1, e.g. http://host:8000/v1"
        return
    if model.source is None:
        yield f"{path}.source: is required: a directory or any model id that vLLM accepts"
    if model.base_url:
        yield f"{path}.base_url: belongs to the http lane only, this is lane {model.lane}"


def _engine_argument_errors(path: str, model: _Model) -> Iterator[str]:
    arguments = {key.replace("-", "_"): value for key, value in model.engine_args.items()}
    for key in _OWN_KEYS:
        if key in arguments:
            yield f"{path}.engine_args.{key}: set {path}.{'source' if key == 'model' else key} instead"
    if model.accelerator == "v100":
        for key in ("dtype", "quantization", "kv_cache_dtype"):
            value = str(arguments.get(key, "")).lower()
            if value.startswith(("bfloat16", "bf16", "fp8")):
                yield f"{path}.engine_args.{key}: a v100 cannot compute in {value}; use float16"


def _catalogue_model(model: _Model) -> CatalogueModel:
    fields = model.model_dump(exclude={"endpoints", "limits", "source", "weights_gib"})
    return CatalogueModel(
        spec=ModelSpec(source=model.source or model.id, **fields),
        endpoints=tuple(endpoint for endpoint in ENDPOINTS if endpoint in model.endpoints),
        limits=ModelLimits(**model.limits.model_dump()),
        weights_gib=model.weights_gib,
    )
