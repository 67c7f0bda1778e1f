"""The job spec: the input of one run of ``ray_job``, as JSON in one environment variable.

It holds no secret. The job reads its token (see ``ray_job.contract.leases``) and, for an endpoint of the http engine,
``CLOISTER_HTTP_ENGINE_API_KEY`` from its environment.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

ENVIRONMENT_VARIABLE: Final = "CLOISTER_JOB_SPEC"
VERSION: Final = 2

ROWS_PER_ENGINE: Final = 256
"""Another engine starts for each further this many rows: fewer are done before it is ready."""

EngineKind = Literal["direct", "processor", "serve", "http"]
ENGINE_KINDS: Final[tuple[EngineKind, ...]] = ("direct", "processor", "serve", "http")

Sharing = Literal["batch", "project", "stack"]


class JobSpecError(ValueError):
    """An unreadable job spec or weights copy; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreLocation:
    """Location of the objects: a directory (``root``) or an S3 bucket (``bucket`` and the rest)."""

    kind: Literal["directory", "s3"]
    root: str = ""
    bucket: str = ""
    prefix: str = ""
    endpoint_url: str = ""
    region: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Settings of one model that its jobs use.

    Attributes:
        id: the name that requests use, e.g. ``llama-3.1-8b``.
        source: a directory or any id that vLLM accepts as ``--model``.
        digest: of the manifest of a pushed model, ``sha256:…``, which its files must match; empty for a model that
            nobody pinned.
        engine: the engine.
        accelerator: what one engine worker runs on: ``cpu`` or the name of a GPU.
        engine_args: vLLM's engine arguments by their Python names, e.g. ``{"max_model_len": 8192}``.
        tensor_parallel_size: GPUs that share each layer of one engine.
        pipeline_parallel_size: groups of GPUs that share the layers of one engine.
        concurrency: engines (Ray actors) that work at the same time.
        batch_size: lines that are enough for a part object; for engines other than ``direct`` those of one call.
            0 leaves it to the engine: see ``part_rows`` and ``call_rows``.
        max_concurrent_batches: engine calls in flight on one engine other than ``direct``, which keeps its engine's
            own window full; lines in flight on one engine are ``call_rows * max_concurrent_batches``.
        request_timeout_s: how long an engine may take to answer a line at most, from when the line was sent to it.
        base_url: the endpoint of the http engine, ending in ``/v1``.
        engine_num_cpus: CPUs that one engine actor reserves in Ray.
        stage_num_cpus: CPUs that one reading, preparing or writing worker reserves in Ray.
        sharing: whose batches share a job and its engines: none, those of a project, or all of the stack.
        keep_warm_s: how long a job stays after its last work, in seconds.
    """

    id: str
    source: str
    digest: str = ""
    engine: EngineKind = "direct"
    accelerator: str = "cpu"
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    concurrency: int = 1
    batch_size: int = 0
    max_concurrent_batches: int = 4
    request_timeout_s: float = 3_600
    base_url: str = ""
    engine_num_cpus: float = 1.0
    stage_num_cpus: float = 0.25
    sharing: Sharing = "project"
    keep_warm_s: int = 30

    @property
    def part_rows(self) -> int:
        """Finished lines that the direct engine commits as a part at once; a part may hold some more."""
        return self.batch_size or 256

    @property
    def call_rows(self) -> int:
        """Lines in one call of an engine other than ``direct``."""
        return self.batch_size or 64

    def engines_for(self, rows: int) -> int:
        """Return how many engines of kind ``direct`` answer so many rows."""
        return max(1, min(self.concurrency, math.ceil(rows / ROWS_PER_ENGINE)))

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine; 0 for the http engine, whose endpoint has its own."""
        if self.accelerator == "cpu" or self.engine == "http":
            return 0
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One run of ``ray_job``, which serves one model.

    Attributes:
        job_id: unique per run; also the submission id of the Ray job.
        coordinator_url: where the job leases segments, e.g. ``http://coordinator:8100``.
        model: the model.
    """

    job_id: str
    coordinator_url: str
    model: ModelSpec

    def to_json(self) -> str:
        """Write the spec as one line of JSON."""
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "JobSpec":
        """Read what ``to_json`` has written.

        Raises:
            JobSpecError: not JSON, another version, or a field that is missing or unknown.
        """
        try:
            raw = json.loads(text)
            version = raw.pop("version")
            if version == VERSION:
                raw["model"] = ModelSpec(**raw["model"])
                return cls(**raw)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise JobSpecError(f"cannot read the job spec in {ENVIRONMENT_VARIABLE}: {error}") from error
        raise JobSpecError(f"job spec has version {version}, this image reads {VERSION}")
