"""The cases of the benchmark: workloads on devices, and the runners that are compared on them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.bench.simulation import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload on a device.

    Attributes:
        workload: a name of ``WORKLOADS``.
        lines: lines of the file.
        runners: the runners, in the order of a round.
        simulation: the simulated GPU; None for the demo model on this machine's processors.
        runs: rounds over all runners.
        model_settings: settings of the model in cloister's catalogue.
        engine_args: vLLM's arguments besides those of the simulation.
        is_warm: whether cloister runs the same batch once before.
    """

    workload: str
    lines: int
    runners: tuple[str, ...]
    simulation: Simulation | None = None
    runs: int = 3
    model_settings: Mapping[str, Any] = field(default_factory=dict)
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    is_warm: bool = False


# float32, because bfloat16 is slower on most CPUs.
CPU_ENGINE_ARGS: Final = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048}
# Ray has few logical CPUs here. An engine whose device is simulated needs little of one.
FOUR_ENGINES: Final = {"concurrency": 4, "engine_num_cpus": 0.25, "stage_num_cpus": 0.1}
H100: Final = Simulation(profile="h100-8b")
A10G: Final = Simulation(profile="a10g-8b")

# Ten minutes on two idle cores.
SELECTION: Final[Mapping[str, Case]] = {
    "lognormal-h100": Case(
        workload="lognormal", lines=1000, runners=("limit", "run_batch", "cloister"), simulation=H100, runs=1
    ),
    "prefix-a10g": Case(
        workload="shared-prefix-tails", lines=500, runners=("run_batch", "cloister"), simulation=A10G, runs=1
    ),
    "start-demo": Case(workload="fixed", lines=8, runners=("http", "cloister"), runs=1, engine_args=CPU_ENGINE_ARGS),
}
_ALL: Final = ("limit", "run_batch", "http", "stock", "cloister")
FULL: Final[Mapping[str, Case]] = {
    "lognormal-h100": Case(workload="lognormal", lines=2000, runners=_ALL, simulation=H100),
    "lognormal-a10g": Case(
        workload="lognormal", lines=500, runners=("limit", "run_batch", "cloister"), simulation=A10G
    ),
    "lognormal-v100": Case(
        workload="lognormal",
        lines=400,
        runners=("limit", "run_batch", "cloister"),
        simulation=Simulation(profile="v100-8b"),
    ),
    "lognormal-l40s": Case(
        workload="lognormal",
        lines=1000,
        runners=("limit", "cloister"),
        simulation=Simulation(profile="l40s-8b"),
        runs=1,
    ),
    "lognormal-h100-70b": Case(
        workload="lognormal",
        lines=800,
        runners=("limit", "cloister"),
        simulation=Simulation(profile="h100-70b"),
        runs=1,
    ),
    "lognormal-h100-own-defaults": Case(
        workload="lognormal",
        lines=2000,
        runners=_ALL,
        simulation=Simulation(profile="h100-8b", own_defaults=True),
        runs=1,
    ),
    "prefix-a10g": Case(
        workload="shared-prefix-tails", lines=1000, runners=("run_batch", "stock", "cloister"), simulation=A10G
    ),
    "equal-prefix-a10g": Case(
        workload="shared-prefix", lines=1000, runners=("run_batch", "cloister"), simulation=A10G, runs=1
    ),
    "prefix-a10g-4-engines": Case(
        workload="shared-prefix-tails",
        lines=2000,
        runners=("cloister",),
        simulation=A10G,
        runs=1,
        model_settings=FOUR_ENGINES,
    ),
    "few-shot-a10g": Case(workload="few-shot", lines=800, runners=("run_batch", "cloister"), simulation=A10G, runs=1),
    "documents-a10g": Case(workload="documents", lines=500, runners=("run_batch", "cloister"), simulation=A10G, runs=1),
    "duplicates-h100": Case(workload="duplicates", lines=1000, runners=("cloister",), simulation=H100, runs=1),
    "long-rows-h100": Case(workload="long-rows", lines=1000, runners=("limit", "cloister"), simulation=H100, runs=1),
    "embeddings-h100": Case(
        workload="embeddings", lines=2000, runners=("limit", "run_batch", "cloister"), simulation=H100, runs=1
    ),
    "clean-h100": Case(workload="lognormal", lines=2000, runners=("cloister",), simulation=H100, runs=1),
    "poisoned-h100": Case(workload="poisoned", lines=2000, runners=("cloister",), simulation=H100, runs=1),
    "large-rows-h100": Case(workload="large-rows", lines=15, runners=("cloister",), simulation=H100, runs=1),
    "lognormal-h100-4-engines": Case(
        workload="lognormal",
        # Four engines start within some seconds of each other on two cores. The work must be long against that.
        lines=6000,
        runners=("cloister",),
        # Four front ends share the processors of this machine: the clock of each device runs slower.
        simulation=Simulation(profile="h100-8b", clock_rate=0.5),
        runs=1,
        model_settings=FOUR_ENGINES,
    ),
    "estimate-h100": Case(
        workload="lognormal", lines=1000, runners=("cloister",), simulation=H100, runs=1, is_warm=True
    ),
    "start-demo": Case(workload="fixed", lines=8, runners=("http", "cloister"), engine_args=CPU_ENGINE_ARGS),
    "fixed-demo": Case(
        workload="fixed", lines=4000, runners=("run_batch", "stock", "cloister"), engine_args=CPU_ENGINE_ARGS
    ),
}
