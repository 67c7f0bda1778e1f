"""The worker that vLLM loads by ``worker_cls``: a GPU that computes nothing and takes the modelled time.

``additional_config`` configures it: ``{"simulated_gpu": {"profile": "h100-8b", "report": "/directory"}}``, and
optionally ``"clock_rate": 8`` for a device whose clock runs faster than real time. A request ends by ``max_tokens``.
Its tokens depend on its prompt only. Log probabilities and structured outputs are not simulated.

A request with ``{"vllm_xargs": {"simulated_fault": "exit"}}`` ends the engine's process, as a request does that
triggers a defect of a kernel.
"""

import os
import time
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from tests.bench.simulated_gpu.device_report import DeviceReport, ReportFile
from tests.bench.simulated_gpu.profiles import PROFILES, Step

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput

CONFIG: Final = "simulated_gpu"
FAULT: Final = "simulated_fault"
EXIT_FAULT: Final = 66
# Below are the special tokens and single bytes of the vocabulary. Tokens above are words, so that any sequence of them
# is text.
FIRST_TOKEN: Final = 300


@dataclass(slots=True)
class Row:
    """A request that the device knows.

    Attributes:
        prompt_tokens: tokens of the prompt.
        max_tokens: tokens to generate; 1 for an embedding.
        seed: where its sequence of tokens starts.
        generated: tokens generated so far, or 1 for an embedding that is computed.
    """

    prompt_tokens: int
    max_tokens: int
    seed: int
    generated: int = 0


class DeviceOutput(AsyncModelRunnerOutput):
    """The result of a step, which is available when the device's clock has reached its end."""

    def __init__(self, output: ModelRunnerOutput, ends_at: float, then: Callable[[], None]) -> None:
        self._output = output
        self._ends_at = ends_at
        self._then = then

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the end of the step."""
        if (wait_s := self._ends_at - time.monotonic()) > 0:
            time.sleep(wait_s)
        self._then()
        return self._output


class SimulatedGpuWorker(WorkerBase):
    """One device. See the module's docstring."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        config = self.vllm_config.additional_config[CONFIG]
        self._profile = PROFILES[config["profile"]]
        self._clock_rate = float(config.get("clock_rate", 1))
        self._is_pooling = self.model_config.runner_type == "pooling"
        # vLLM's CPU platform switches this off. The scheduler of the same process is created after this worker.
        self.scheduler_config.async_scheduling = not self._is_pooling
        self._report = DeviceReport(profile=config["profile"], clock_rate=self._clock_rate)
        self._file = ReportFile(Path(config["report"]), self._report)
        self._rows: dict[str, Row] = {}
        self._vocabulary = self.model_config.get_vocab_size()
        self._output: ModelRunnerOutput | AsyncModelRunnerOutput = EMPTY_MODEL_RUNNER_OUTPUT

    def init_device(self) -> None:
        """Set the device that vLLM expects on a CPU."""
        self.device = torch.device("cpu")

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load nothing."""

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        """Return the layers of the profile's model instead of those of the small model."""
        model = self._profile.model
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=model.kv_heads,
            head_size=model.head_size,
            dtype=torch.float16,
        )
        return {f"model.layers.{layer}.self_attn.attn": spec for layer in range(model.layers)}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Return the layout of vLLM's CPU backend."""
        return ["LBHNC"]

    def determine_available_memory(self) -> int:
        """Return the memory that the profile's model leaves."""
        return self._profile.kv_cache_bytes

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate nothing."""
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        self._report.engine = {
            "max_num_seqs": self.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": self.scheduler_config.max_num_batched_tokens,
            "max_model_len": self.model_config.max_model_len,
            "block_size": self.cache_config.block_size,
            "kv_cache_blocks": kv_cache_config.num_blocks,
            "prefix_caching": bool(self.cache_config.enable_prefix_caching),
            "chunked_prefill": bool(self.scheduler_config.enable_chunked_prefill),
        }

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Compile nothing."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return what the engine offers."""
        return ("embed",) if self._is_pooling else ("generate",)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Accept a context that vLLM shortened to the KV cache."""
        self.model_config.max_model_len = max_model_len

    def synchronize_device(self) -> None:
        """Wait for the end of the last step."""
        time.sleep(max(0.0, self._report.last_step_ends_at - time.monotonic()))

    def execute_dummy_batch(self) -> None:
        """Do nothing."""

    def take_draft_token_ids(self) -> None:
        """Return no draft tokens."""

    def shutdown(self) -> None:
        """Write the report."""
        self._file.write(idle=True)

    def execute_model(self, scheduler_output: "SchedulerOutput") -> Any:
        """Compute a step: find its time and its tokens.

        Returns:
            The output if there is nothing to sample; otherwise None, and ``sample_tokens`` returns it.
        """
        for request_id in scheduler_output.finished_req_ids:
            self._rows.pop(request_id, None)
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        states = self._states(scheduler_output)
        tokens: list[list[int]] = []
        context = pairs = finished = 0
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            before, known = states[request_id]
            context += before
            pairs += count * before + count * (count + 1) // 2
            sampled, is_last = self._sampled(request_id, before + count, known)
            tokens.append(sampled)
            finished += is_last
        step = Step(tokens=scheduler_output.total_num_scheduled_tokens, context_tokens=context, attended_pairs=pairs)
        ends_at = self._report.add_step(
            now=time.monotonic(),
            duration_s=self._profile.step_s(step) / self._clock_rate,
            running=len(tokens),
            finished=finished,
        )
        self._output = self._result(list(scheduler_output.num_scheduled_tokens), tokens, ends_at)
        return self._output if self._is_pooling else None

    def sample_tokens(self, grammar_output: "GrammarOutput | None") -> Any:  # noqa: ARG002 - vLLM's interface
        """Return the output of the step that ``execute_model`` computed."""
        return self._output

    def _states(self, scheduler_output: "SchedulerOutput") -> dict[str, tuple[int, int]]:
        """Register new requests.

        Returns:
            For each scheduled request the tokens in the KV cache, and the output tokens that the scheduler knows or
            expects from steps in flight.
        """
        states = {}
        for new in scheduler_output.scheduled_new_reqs:
            known = 0
            if new.req_id in self._rows:  # vLLM's second model runner receives resumed requests as new ones
                self._report.preemptions += 1
                known = len(new.prefill_token_ids or ()) - self._rows[new.req_id].prompt_tokens
            else:
                self._register(new)
            states[new.req_id] = (new.num_computed_tokens, max(0, known))
        cached = scheduler_output.scheduled_cached_reqs
        self._report.preemptions += len(cached.resumed_req_ids)
        counts = zip(cached.num_computed_tokens, cached.num_output_tokens, strict=True)
        states.update(zip(cached.req_ids, counts, strict=True))
        return states

    def _register(self, new: "NewRequestData") -> None:
        prompt = array("I", new.prompt_token_ids or [])
        sampling = new.sampling_params
        if sampling is not None and (sampling.extra_args or {}).get(FAULT) == "exit":
            self._file.write(idle=True)
            os._exit(EXIT_FAULT)
        room = self.model_config.max_model_len - len(prompt)
        max_tokens = min((sampling.max_tokens or room), room) if sampling is not None else 1
        self._rows[new.req_id] = Row(prompt_tokens=len(prompt), max_tokens=max_tokens, seed=zlib.crc32(prompt))
        self._report.prompt_tokens += len(prompt)
        self._report.hit_tokens += new.num_computed_tokens

    def _sampled(self, request_id: str, computed: int, known: int) -> tuple[list[int], bool]:
        """Return the token that a request samples at the end of the step, and whether it is the last one.

        Args:
            request_id: the request.
            computed: tokens in the KV cache after the step.
            known: output tokens known before the step. A request that was preempted computes them again.
        """
        row = self._rows.get(request_id)
        if row is None or computed < row.prompt_tokens + known:
            return [], False
        position = computed - row.prompt_tokens
        is_new = position >= row.generated
        is_last = is_new and position + 1 >= row.max_tokens
        row.generated = max(row.generated, position + 1)
        if self._is_pooling:
            return [], is_last
        self._report.generated_tokens += is_new
        return [FIRST_TOKEN + (row.seed + 7919 * position) % (self._vocabulary - FIRST_TOKEN)], is_last

    def _result(self, request_ids: list[str], tokens: list[list[int]], ends_at: float) -> DeviceOutput:
        output = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=tokens,
            pooler_output=[self._embedding(each) for each in request_ids] if self._is_pooling else None,
        )
        idle = not any(row.generated < row.max_tokens for row in self._rows.values())
        return DeviceOutput(output, ends_at, lambda: self._file.write(idle=idle))

    def _embedding(self, request_id: str) -> torch.Tensor | None:
        row = self._rows.get(request_id)
        if row is None or not row.generated:
            return None
        size = self.model_config.get_hidden_size()
        return torch.nn.functional.normalize(torch.linspace(-1, 1, size).roll(row.seed % size), dim=0)
