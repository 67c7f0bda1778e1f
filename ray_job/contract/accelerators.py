"""Accelerators as data: memory, Kubernetes resource, number formats and image of what engine workers run on.

A new accelerator needs a row, here or in the section ``accelerators`` of a stack file, and no code.

Memory is what the NVIDIA driver reports (``nvidia-smi --query-gpu=memory.total``, drivers from R510). It is less than
the product name suggests: 23,028 MiB on an A10G, which is sold with 24 GB. Compute
capabilities are from https://developer.nvidia.com/cuda-gpus.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from ray_job.contract.cluster import GPU_RESOURCE

ImageVariant = Literal["cpu", "v100", "cuda13"]
Capability = tuple[int, int]

OLDEST_CUDA13: Final[Capability] = (7, 5)
"""CUDA 13 has no code for older GPUs, and vLLM's CUDA 13 wheels start there too: their list of architectures is
7.5, 8.0, 8.6, 8.9, 9.0, 10.0, 11.0 and 12.0 (``torch_cuda_arch_list`` in vLLM's docker/Dockerfile)."""
OLDEST_SUPPORTED: Final[Capability] = (7, 0)
"""The oldest GPU that the image variant ``v100`` supports."""

MIN_DRIVER: Final[Mapping[ImageVariant, int]] = MappingProxyType({"v100": 525, "cuda13": 580})
"""The oldest branch of NVIDIA's driver for each image variant, by the CUDA that it holds: 525 for CUDA 12, 580 for 13.
580 is also the last branch that supports V100.
Source: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"""

# Values of vLLM's engine arguments, and the oldest GPU that runs each. Data types: vllm/platforms/cuda.py
# (`supported_dtypes`). Quantizations: `get_min_capability` of each method in vllm/model_executor/layers/quantization;
# from 7.5 to 8.8 fp8 weights are unpacked for 16-bit arithmetic. An fp8 cache needs FlashInfer, which starts at 8.0.
REQUIRED_CAPABILITY: Final[Mapping[str, Mapping[str, Capability]]] = MappingProxyType(
    {
        "dtype": {"float16": (6, 0), "float32": (6, 0), "bfloat16": (8, 0)},
        "quantization": {
            "gptq": (6, 0),
            "bitsandbytes": (7, 0),
            "compressed-tensors": (7, 0),
            "moe_wna16": (7, 0),
            "quark": (7, 0),
            "awq": (7, 5),
            "awq_marlin": (7, 5),
            "fp8": (7, 5),
            "gptq_marlin": (7, 5),
            "modelopt_fp4": (7, 5),
            "torchao": (7, 5),
            "experts_int8": (8, 0),
            "fbgemm_fp8": (8, 0),
            "modelopt": (8, 0),
            "mxfp4": (8, 0),
        },
        "kv_cache_dtype": {"float16": (6, 0), "bfloat16": (8, 0), "fp8": (8, 0)},
    }
)
# Other spellings that vLLM accepts.
_ALIASES: Final = MappingProxyType(
    {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A CPU, a GPU or a slice of a GPU that one engine worker runs on.

    Attributes:
        name: the name in models, and of the node pool.
        resource: the extended resource that a pod requests; empty for a CPU.
        memory_mib: memory of one GPU or MIG slice as the driver reports it, in MiB; 0 for a CPU.
        capability: CUDA compute capability; None for a CPU.
        image_variant: the Ray image that runs on it.
        product: a word of the product name that ``nvidia-smi`` prints; empty for a MIG slice.
        source: where ``memory_mib`` is from.
        is_nominal: ``memory_mib`` is the vendor's figure, because no driver's figure was found.
    """

    name: str
    resource: str = GPU_RESOURCE
    memory_mib: int
    capability: Capability | None
    image_variant: ImageVariant = "cuda13"
    product: str = ""
    source: str
    is_nominal: bool = False

    @property
    def min_driver(self) -> int:
        """The oldest branch of NVIDIA's driver that its image runs with; 0 for a CPU."""
        return MIN_DRIVER.get(self.image_variant, 0)

    @property
    def is_mig(self) -> bool:
        """True for a MIG slice. Slices cannot work together on one engine."""
        return self.resource.startswith("nvidia.com/mig-")

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Data types that it computes in, by vLLM's names."""
        return self._supported("dtype")

    @property
    def quantizations(self) -> tuple[str, ...]:
        """Quantization methods of vLLM that it runs."""
        return self._supported("quantization")

    def _supported(self, argument: str) -> tuple[str, ...]:
        return tuple(value for value in REQUIRED_CAPABILITY[argument] if not self.missing_capability(argument, value))

    def missing_capability(self, argument: str, value: str) -> Capability | None:
        """Return the compute capability that a value of an engine argument needs; None if this accelerator has it.

        Args:
            argument: ``dtype``, ``quantization`` or ``kv_cache_dtype``.
            value: the argument's value. vLLM checks values that the table lacks.
        """
        name = value.lower()
        needed = REQUIRED_CAPABILITY[argument].get(_ALIASES.get(name, name))
        if needed is None or self.capability is None or self.capability >= needed:
            return None
        return needed


def variant_for(capability: Capability) -> ImageVariant:
    """Return the image variant for a GPU."""
    return "cuda13" if capability >= OLDEST_CUDA13 else "v100"


def capability_text(capability: Capability) -> str:
    """Format a compute capability: ``8.6``."""
    return ".".join(map(str, capability))


_SMI_LIST: Final = "https://github.com/modal-labs/modal-client/pull/2797"
_MIG_GUIDE: Final = "https://docs.nvidia.com/datacenter/tesla/mig-user-guide/supported-mig-profiles.html"
_H100_MIG: Final = "https://jbarrow.ai/field_notes/nvidia-mig/"

CPU: Final = Accelerator(
    name="cpu", resource="", memory_mib=0, capability=None, image_variant="cpu", source="no GPU memory"
)

_ROWS: Final = (
    CPU,
    Accelerator(
        name="v100",
        memory_mib=32_768,
        capability=(7, 0),
        image_variant="v100",
        product="V100",
        source="nvidia-smi on Tesla V100-SXM2-32GB, R510 and newer",
    ),
    Accelerator(
        name="v100-16gb",
        memory_mib=16_384,
        capability=(7, 0),
        image_variant="v100",
        product="V100",
        source="https://www.nvidia.com/en-us/data-center/v100/",
        is_nominal=True,
    ),
    Accelerator(name="t4", memory_mib=15_360, capability=(7, 5), product="T4", source=_SMI_LIST),
    Accelerator(name="a10", memory_mib=23_028, capability=(8, 6), product="A10", source=_SMI_LIST),
    Accelerator(
        name="a10g",
        memory_mib=23_028,
        capability=(8, 6),
        product="A10G",
        source="https://github.com/NVIDIA/DCGM/issues/232",
    ),
    Accelerator(name="l4", memory_mib=23_034, capability=(8, 9), product="L4", source=_SMI_LIST),
    Accelerator(name="l40s", memory_mib=46_068, capability=(8, 9), product="L40S", source=_SMI_LIST),
    Accelerator(name="a100-40gb", memory_mib=40_960, capability=(8, 0), product="A100", source=_SMI_LIST),
    Accelerator(name="a100-80gb", memory_mib=81_920, capability=(8, 0), product="A100", source=_SMI_LIST),
    Accelerator(name="h100", memory_mib=81_559, capability=(9, 0), product="H100", source=_SMI_LIST),
    Accelerator(name="h200", memory_mib=143_771, capability=(9, 0), product="H200", source="nvidia-smi on NVIDIA H200"),
    Accelerator(
        name="b200", memory_mib=183_359, capability=(10, 0), product="B200", source="nvidia-smi on NVIDIA B200, R570"
    ),
    # The guide gives names of slices and no figures for an A100: these are the gigabytes of the name, in MiB.
    Accelerator(
        name="a100-1g-10gb",
        resource="nvidia.com/mig-1g.10gb",
        memory_mib=9_536,
        capability=(8, 0),
        source=_MIG_GUIDE,
        is_nominal=True,
    ),
    Accelerator(
        name="a100-2g-20gb",
        resource="nvidia.com/mig-2g.20gb",
        memory_mib=19_073,
        capability=(8, 0),
        source=_MIG_GUIDE,
        is_nominal=True,
    ),
    Accelerator(
        name="a100-3g-40gb",
        resource="nvidia.com/mig-3g.40gb",
        memory_mib=38_146,
        capability=(8, 0),
        source=_MIG_GUIDE,
        is_nominal=True,
    ),
    # `nvidia-smi mig -lgip` on an H100 80GB: 9.75, 19.62 and 39.50 GiB.
    Accelerator(
        name="h100-1g-10gb", resource="nvidia.com/mig-1g.10gb", memory_mib=9_984, capability=(9, 0), source=_H100_MIG
    ),
    Accelerator(
        name="h100-2g-20gb", resource="nvidia.com/mig-2g.20gb", memory_mib=20_090, capability=(9, 0), source=_H100_MIG
    ),
    Accelerator(
        name="h100-3g-40gb", resource="nvidia.com/mig-3g.40gb", memory_mib=40_448, capability=(9, 0), source=_H100_MIG
    ),
)

ACCELERATORS: Final[Mapping[str, Accelerator]] = MappingProxyType({row.name: row for row in _ROWS})
"""The built-in rows by name."""
