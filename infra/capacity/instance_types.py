"""EC2 instance types for node pools: what each has, and how much of it pods can request.

vCPUs, memory and GPUs: https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html and
https://docs.aws.amazon.com/ec2/latest/instancetypes/gp.html, read in November 2026. Of the types with V100 only
p3dn.24xlarge is left. The table has types that exist somewhere; the preview asks AWS which of them a region offers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceType:
    """An EC2 instance type on x86-64.

    Attributes:
        name: name of the type, e.g. ``g5.12xlarge``.
        accelerator: name in the table of accelerators.
        gpus: whole GPUs; 0 for ``cpu``.
        vcpus: vCPUs.
        memory_gib: memory, in GiB.
    """

    name: str
    accelerator: str
    gpus: int
    vcpus: int
    memory_gib: int

    @property
    def pod_cpus(self) -> int:
        """CPUs that pods of a pool can request: kubelet, system and the agents of EKS take less than one."""
        return self.vcpus - 1

    @property
    def pod_memory_gib(self) -> int:
        """Memory that pods of a pool can request, in GiB.

        Karpenter assumes that the hypervisor takes 7.5 % (``vm-memory-overhead-percent``,
        https://karpenter.sh/docs/reference/settings/); the kubelet reserves up to 3 GiB for hundreds of pods, of which
        a GPU node has few.
        """
        return int(self.memory_gib * 0.925) - 1


def _family(name: str, accelerator: str, *, single: dict[str, tuple[int, int]]) -> list[InstanceType]:
    """Return the sizes of a family that have one GPU or none, as ``{size: (vCPUs, GiB)}``."""
    gpus = 0 if accelerator == "cpu" else 1
    return [
        InstanceType(name=f"{name}.{size}", accelerator=accelerator, gpus=gpus, vcpus=vcpus, memory_gib=memory_gib)
        for size, (vcpus, memory_gib) in single.items()
    ]


_SIZES: Final = {"xlarge": (4, 16), "2xlarge": (8, 32), "4xlarge": (16, 64), "8xlarge": (32, 128)}
_G6E_SIZES: Final = {"xlarge": (4, 32), "2xlarge": (8, 64), "4xlarge": (16, 128), "8xlarge": (32, 256)}

INSTANCE_TYPES: Final[tuple[InstanceType, ...]] = (
    *_family("m7i", "cpu", single={**_SIZES, "12xlarge": (48, 192), "16xlarge": (64, 256), "24xlarge": (96, 384)}),
    *_family("m6i", "cpu", single={**_SIZES, "12xlarge": (48, 192), "16xlarge": (64, 256), "24xlarge": (96, 384)}),
    *_family("g4dn", "t4", single={**_SIZES, "16xlarge": (64, 256)}),
    InstanceType(name="g4dn.12xlarge", accelerator="t4", gpus=4, vcpus=48, memory_gib=192),
    *_family("g5", "a10g", single={**_SIZES, "16xlarge": (64, 256)}),
    InstanceType(name="g5.12xlarge", accelerator="a10g", gpus=4, vcpus=48, memory_gib=192),
    InstanceType(name="g5.24xlarge", accelerator="a10g", gpus=4, vcpus=96, memory_gib=384),
    InstanceType(name="g5.48xlarge", accelerator="a10g", gpus=8, vcpus=192, memory_gib=768),
    *_family("g6", "l4", single={**_SIZES, "16xlarge": (64, 256)}),
    InstanceType(name="g6.12xlarge", accelerator="l4", gpus=4, vcpus=48, memory_gib=192),
    InstanceType(name="g6.24xlarge", accelerator="l4", gpus=4, vcpus=96, memory_gib=384),
    InstanceType(name="g6.48xlarge", accelerator="l4", gpus=8, vcpus=192, memory_gib=768),
    *_family("g6e", "l40s", single={**_G6E_SIZES, "16xlarge": (64, 512)}),
    InstanceType(name="g6e.12xlarge", accelerator="l40s", gpus=4, vcpus=48, memory_gib=384),
    InstanceType(name="g6e.24xlarge", accelerator="l40s", gpus=4, vcpus=96, memory_gib=768),
    InstanceType(name="g6e.48xlarge", accelerator="l40s", gpus=8, vcpus=192, memory_gib=1_536),
    InstanceType(name="p3dn.24xlarge", accelerator="v100", gpus=8, vcpus=96, memory_gib=768),
    InstanceType(name="p4d.24xlarge", accelerator="a100-40gb", gpus=8, vcpus=96, memory_gib=1_152),
    InstanceType(name="p4de.24xlarge", accelerator="a100-80gb", gpus=8, vcpus=96, memory_gib=1_152),
    InstanceType(name="p5.48xlarge", accelerator="h100", gpus=8, vcpus=192, memory_gib=2_048),
    InstanceType(name="p5en.48xlarge", accelerator="h200", gpus=8, vcpus=192, memory_gib=2_048),
)


def instance_types_of(accelerator: str) -> list[InstanceType]:
    """Return the instance types with an accelerator; ``cpu`` for those without a GPU."""
    return [each for each in INSTANCE_TYPES if each.accelerator == accelerator]


def smallest_fitting(
    candidates: Iterable[InstanceType], *, gpus: int, cpus: int, memory_gib: int
) -> tuple[InstanceType, ...]:
    """Return the types whose nodes have this many GPUs and room for the pods of a pool, the smallest sizes only.

    Several families may have the same smallest size: each is a further chance of capacity.

    Args:
        candidates: types to choose from.
        gpus: GPUs of one node.
        cpus: CPUs of one node that pods request.
        memory_gib: memory of one node that pods request, in GiB.
    """
    fitting = [
        each for each in candidates if each.gpus == gpus and each.pod_cpus >= cpus and each.pod_memory_gib >= memory_gib
    ]
    least = min((each.vcpus for each in fitting), default=0)
    return tuple(each for each in fitting if each.vcpus == least)
