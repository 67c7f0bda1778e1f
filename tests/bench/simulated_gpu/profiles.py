"""GPUs and models as figures, and the modelled time of one step of the engine.

A step takes the longer of two times, and a fixed overhead: reading the weights and the KV cache at the memory
bandwidth, or computing at the effective rate. Several GPUs count as one with the sum of their memory, bandwidth and
compute, and exchange the activations of each layer twice over their links.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ray_job.contract.accelerators import ACCELERATORS

BYTES_PER_VALUE: Final = 2
"""Weights, KV cache and activations are float16."""
ALL_REDUCES_PER_LAYER: Final = 2
"""After attention and after the feed-forward network, as in Megatron-LM (https://arxiv.org/abs/1909.08053)."""
MEMORY_UTILIZATION: Final = 0.92
"""vLLM's default of ``gpu_memory_utilization``."""
RESERVED_BYTES: Final = 1 << 30
"""Activations and CUDA graphs of one GPU. An assumption; vLLM prints the real figure when an engine starts."""
STEP_OVERHEAD_S: Final = 0.0015
"""Launching a CUDA graph, sampling and copying the tokens to the host. An assumption, to be calibrated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU.

    Attributes:
        accelerator: its row in the table of accelerators, which has its memory.
        bandwidth: bytes per second of its memory.
        peak_flops: dense float16 operations per second of its tensor cores.
        effective_flops: what matrix multiplications of a model reach. An assumption, to be calibrated.
        link_bandwidth: bytes per second to the other GPUs, in one direction.
        source: where the figures are from.
    """

    accelerator: str
    bandwidth: float
    peak_flops: float
    effective_flops: float
    link_bandwidth: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A dense transformer with grouped-query attention."""

    parameters: float
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    source: str

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return int(self.parameters * BYTES_PER_VALUE)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token occupies in the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_size * BYTES_PER_VALUE


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The work of one step.

    Attributes:
        tokens: tokens that the step computes.
        context_tokens: tokens in the KV cache of all scheduled requests, which attention reads.
        attended_pairs: pairs of a computed token and a token that it attends to.
    """

    tokens: int
    context_tokens: int
    attended_pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model on as many GPUs as it needs."""

    gpu: Gpu
    model: Model
    gpus: int = 1
    overhead_s: float = STEP_OVERHEAD_S

    @property
    def kv_cache_bytes(self) -> int:
        """The memory that weights and activations leave."""
        memory_bytes = ACCELERATORS[self.gpu.accelerator].memory_mib * 2**20
        return int(self.gpus * (memory_bytes * MEMORY_UTILIZATION - RESERVED_BYTES)) - self.model.weight_bytes

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.kv_cache_bytes // self.model.kv_bytes_per_token

    def step_s(self, step: Step) -> float:
        """Return the seconds that a step takes."""
        memory_s = self.read_bytes(step) / (self.gpus * self.gpu.bandwidth)
        compute_s = self.flops(step) / (self.gpus * self.gpu.effective_flops)
        return max(memory_s, compute_s) + self._exchange_s(step.tokens) + self.overhead_s

    def read_bytes(self, step: Step) -> float:
        """Return the bytes of weights and KV cache that a step moves."""
        return self.model.weight_bytes + self.model.kv_bytes_per_token * (step.context_tokens + step.tokens)

    def flops(self, step: Step) -> float:
        """Return the operations of a step."""
        model = self.model
        attention = 4 * model.layers * model.heads * model.head_size * step.attended_pairs
        return 2 * model.parameters * step.tokens + attention

    def _exchange_s(self, tokens: int) -> float:
        """Return the seconds of the ring all-reduces between the GPUs."""
        message_bytes = tokens * self.model.hidden_size * BYTES_PER_VALUE
        sent_bytes = 2 * (self.gpus - 1) / self.gpus * message_bytes
        return self.model.layers * ALL_REDUCES_PER_LAYER * sent_bytes / self.gpu.link_bandwidth

    def max_num_seqs(self, mean_row_tokens: float, *, most: int = 1024) -> int:
        """Return how many rows of a mean length the KV cache holds, as a multiple of 8."""
        return max(8, min(most, int(self.kv_cache_tokens / mean_row_tokens) // 8 * 8))


V100: Final = Gpu(
    accelerator="v100",
    bandwidth=900e9,
    peak_flops=125e12,
    effective_flops=40e12,
    link_bandwidth=150e9,
    source="https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
)
A10G: Final = Gpu(
    accelerator="a10g",
    bandwidth=600e9,
    peak_flops=70e12,
    effective_flops=70e12,
    link_bandwidth=32e9,
    source="https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference/",
)
L40S: Final = Gpu(
    accelerator="l40s",
    bandwidth=864e9,
    peak_flops=362.05e12,
    effective_flops=145e12,
    link_bandwidth=32e9,
    source="https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413",
)
H100: Final = Gpu(
    accelerator="h100",
    bandwidth=3.35e12,
    peak_flops=989e12,
    effective_flops=400e12,
    link_bandwidth=450e9,
    source="https://www.nvidia.com/en-us/data-center/h100/ (SXM; half of the figures with sparsity)",
)

LLAMA_8B: Final = Model(
    parameters=8.03e9,
    layers=32,
    hidden_size=4096,
    heads=32,
    kv_heads=8,
    head_size=128,
    source="https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json",
)
LLAMA_70B: Final = Model(
    parameters=70.55e9,
    layers=80,
    hidden_size=8192,
    heads=64,
    kv_heads=8,
    head_size=128,
    source="https://huggingface.co/meta-llama/Llama-3.1-70B/blob/main/config.json",
)

PROFILES: Final[Mapping[str, Profile]] = MappingProxyType(
    {
        "v100-8b": Profile(gpu=V100, model=LLAMA_8B),
        "a10g-8b": Profile(gpu=A10G, model=LLAMA_8B),
        "l40s-8b": Profile(gpu=L40S, model=LLAMA_8B),
        "h100-8b": Profile(gpu=H100, model=LLAMA_8B),
        # The fewest GPUs (a power of two) that hold the weights and a KV cache of 64,000 tokens.
        "v100-70b": Profile(gpu=V100, model=LLAMA_70B, gpus=8),
        "a10g-70b": Profile(gpu=A10G, model=LLAMA_70B, gpus=8),
        "l40s-70b": Profile(gpu=L40S, model=LLAMA_70B, gpus=4),
        "h100-70b": Profile(gpu=H100, model=LLAMA_70B, gpus=4),
    }
)
