"""The job spec: all that one run of ``ray_job`` is told, as JSON in one environment variable.

It holds no secret. Credentials reach the job by its own environment: ``PGPASSFILE`` for Postgres,
boto3's and PyArrow's usual variables or the pod's identity for S3, ``CLOISTER_HTTP_LANE_API_KEY``
for an endpoint of the http lane.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

ENVIRONMENT_VARIABLE: Final = "CLOISTER_JOB_SPEC"
VERSION: Final = 1

EngineLane = Literal["direct", "processor", "serve", "http"]
ENGINE_LANES: Final[tuple[EngineLane, ...]] = ("direct", "processor", "serve", "http")
Accelerator = Literal["cpu", "v100", "a10g"]
ACCELERATORS: Final[tuple[Accelerator, ...]] = ("cpu", "v100", "a10g")


class JobSpecError(ValueError):
    """A job spec that cannot be read; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreLocation:
    """Where the objects lie: a directory (``root``) or an S3 bucket (``bucket`` and the rest)."""

    kind: Literal["directory", "s3"]
    root: str = ""
    bucket: str = ""
    prefix: str = ""
    endpoint_url: str = ""
    region: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model of the catalogue, as the engine stage needs it.

    Attributes:
        id: the name that requests use, e.g. ``llama-3.1-8b``.
        source: a directory or any id that vLLM accepts as ``--model``.
        lane: the engine lane.
        accelerator: what one engine worker runs on.
        engine_args: vLLM's engine arguments by their Python names, e.g. ``{"max_model_len": 8192}``.
        tensor_parallel_size: GPUs that share each layer of one engine.
        pipeline_parallel_size: groups of GPUs that share the layers of one engine.
        concurrency: engines (Ray actors) that work at the same time.
        batch_size: lines in one engine call and in one part object.
        max_concurrent_batches: engine calls in flight on one engine; lines in flight on one engine
            are ``batch_size * max_concurrent_batches``.
        base_url: the endpoint of the http lane, ending in ``/v1``.
        engine_num_cpus: CPUs that one engine actor reserves in Ray.
        stage_num_cpus: CPUs that one reading, preparing or writing worker reserves in Ray.
    """

    id: str
    source: str
    lane: EngineLane = "direct"
    accelerator: Accelerator = "cpu"
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    concurrency: int = 1
    batch_size: int = 64
    max_concurrent_batches: int = 4
    base_url: str = ""
    engine_num_cpus: float = 1.0
    stage_num_cpus: float = 0.25

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine."""
        if self.accelerator == "cpu":
            return 0
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One run of ``ray_job`` over one batch.

    Attributes:
        job_id: unique per attempt, ``{batch_id}-{attempt}``; also the submission id of the Ray job.
        batch_id: the batch.
        attempt: from 1; progress of an older attempt is refused by the database.
        endpoint: the endpoint of every line, e.g. ``/v1/chat/completions``.
        input_key: the object with the input file.
        object_store: where input and parts lie.
        database_url: a libpq connection string without a password, empty for no progress reports.
        model: the model of every line.
    """

    job_id: str
    batch_id: str
    attempt: int
    endpoint: str
    input_key: str
    object_store: ObjectStoreLocation
    database_url: str
    model: ModelSpec

    def to_json(self) -> str:
        """The spec as one line of JSON."""
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "JobSpec":
        """Reads what ``to_json`` wrote.

        Raises:
            JobSpecError: not JSON, another version, or a field that is missing or unknown.
        """
        try:
            raw = json.loads(text)
            version = raw.pop("version")
            if version == VERSION:
                raw["object_store"] = ObjectStoreLocation(**raw["object_store"])
                raw["model"] = ModelSpec(**raw["model"])
                return cls(**raw)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise JobSpecError(f"cannot read the job spec in {ENVIRONMENT_VARIABLE}: {error}") from error
        raise JobSpecError(f"job spec has version {version}, this image reads {VERSION}")
