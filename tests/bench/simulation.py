"""The engine arguments that replace the device of vLLM by a simulated GPU, and the model directory that they need."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ray_job.contract.job_spec import ModelSpec
from ray_job.demo_model import make_demo_model
from ray_job.engines.engine_args import effective_engine_args
from tests.bench.simulated_gpu.profiles import PROFILES
from tests.bench.workloads import Workload

WORKER: Final = "tests.bench.simulated_gpu.worker.SimulatedGpuWorker"
EXECUTOR: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
BATCHED_TOKENS: Final = 8192
"""What ``LLM`` of vLLM takes on GPUs below 70 GiB."""
BATCHED_TOKENS_LARGE: Final = 16_384
"""What ``LLM`` of vLLM takes on GPUs from 70 GiB."""
LARGE_GPUS: Final = ("h100",)
CONTEXT_TOKENS: Final = 131_072
# What vLLM takes for (max_num_seqs, max_num_batched_tokens) on GPUs below 70 GiB, and above. The CPU platform takes
# other values. Source: `get_batch_defaults` in vllm/engine/arg_utils.py of vLLM 0.32 by usage context; contexts that it
# does not list, such as that of run_batch, get the defaults of `SchedulerConfig`.
Limits = tuple[int, int]
LIMITS_OF_VLLM: Final[Mapping[str, tuple[Limits, Limits]]] = {
    "limit": ((256, 8192), (1024, 16_384)),
    "http": ((256, 2048), (1024, 8192)),
    "cloister": ((256, 8192), (1024, 16_384)),
    "run_batch": ((128, 2048), (128, 2048)),
    "stock": ((128, 2048), (128, 2048)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulated device.

    Attributes:
        profile: a name of ``PROFILES``.
        clock_rate: how much faster than real time the device's clock runs. A slow GPU leaves the processors idle most
            of the time, so that a faster clock changes little and the run ends sooner.
        own_defaults: leave the limits of the engine to each runner's defaults.
    """

    profile: str
    clock_rate: float = 1.0
    own_defaults: bool = False

    def engine_args(self, workload: Workload, report: Path, *, runner: str = "limit") -> dict[str, Any]:
        """Return vLLM's engine arguments by their Python names.

        Args:
            workload: the lines, which decide how many of them the KV cache holds.
            report: the directory for the reports of the devices.
            runner: the runner, which matters for its own defaults only.
        """
        profile = PROFILES[self.profile]
        pooling = workload.endpoint.endswith("/embeddings")
        arguments: dict[str, Any] = {
            "worker_cls": WORKER,
            # vLLM's CPU platform starts a second process for "uni", which cannot overlap scheduling with the device.
            "distributed_executor_backend": EXECUTOR,
            "additional_config": {
                "simulated_gpu": {
                    "profile": self.profile,
                    "report": str(report.absolute()),
                    "clock_rate": self.clock_rate,
                }
            },
            "block_size": 16,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": workload.max_model_len,
            "disable_log_stats": True,
        }
        if pooling:
            arguments |= {"runner": "pooling"}
        else:
            arguments |= {"enable_chunked_prefill": True, "enable_prefix_caching": True}
        if self.own_defaults:
            return {**arguments, **self._own_limits(runner, arguments)}
        return {
            **arguments,
            "max_num_seqs": profile.max_num_seqs(workload.mean_row_tokens),
            "max_num_batched_tokens": BATCHED_TOKENS_LARGE if self._is_large else BATCHED_TOKENS,
        }

    @property
    def _is_large(self) -> bool:
        return PROFILES[self.profile].gpu.accelerator in LARGE_GPUS

    def _own_limits(self, runner: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the limits that a runner takes on this GPU if nothing is set."""
        seqs, tokens = LIMITS_OF_VLLM[runner][self._is_large]
        limits = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
        if runner == "cloister":
            spec = ModelSpec(
                id="bench", source="", engine_args=arguments, accelerator=PROFILES[self.profile].gpu.accelerator
            )
            chosen = effective_engine_args(spec)
            limits |= {name: chosen[name] for name in limits if chosen.get(name)}
        return limits


def make_simulated_model(directory: Path, demo_model: Path) -> None:
    """Make a copy of the demo model with a context of 131,072 tokens. Its weights are never loaded."""
    if (directory / "config.json").exists():
        return
    make_demo_model(demo_model)
    shutil.copytree(demo_model, directory, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "model_max_length": CONTEXT_TOKENS}))
    config = json.loads((demo_model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT_TOKENS}))
