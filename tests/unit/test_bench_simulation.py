from pathlib import Path
from typing import Any

import pytest

from tests.bench.simulation import Simulation
from tests.bench.workloads import WORKLOADS

REPORT = Path("/reports")


def limits(simulation: Simulation, *, workload: str = "lognormal", runner: str = "limit") -> tuple[Any, Any]:
    arguments = simulation.engine_args(WORKLOADS[workload], REPORT, runner=runner)
    return arguments["max_num_seqs"], arguments["max_num_batched_tokens"]


def test_worker_gets_its_profile_and_the_directory_for_its_report() -> None:
    arguments = Simulation(profile="a10g-8b", clock_rate=4).engine_args(WORKLOADS["lognormal"], REPORT)
    assert arguments["worker_cls"] == "tests.bench.simulated_gpu.worker.SimulatedGpuWorker"
    assert arguments["additional_config"] == {
        "simulated_gpu": {"profile": "a10g-8b", "report": "/reports", "clock_rate": 4}
    }


def test_all_runners_get_equal_limits() -> None:
    simulation = Simulation(profile="h100-8b")
    assert len({limits(simulation, runner=runner) for runner in ("limit", "run_batch", "stock", "cloister")}) == 1


def test_long_rows_lower_the_number_that_runs() -> None:
    simulation = Simulation(profile="a10g-8b")
    assert limits(simulation, workload="long-rows")[0] < limits(simulation)[0]


@pytest.mark.parametrize(
    ("profile", "runner", "expected"),
    [
        ("h100-8b", "limit", (1024, 16_384)),
        ("h100-8b", "http", (1024, 8192)),
        ("a10g-8b", "http", (256, 2048)),
        ("h100-8b", "run_batch", (128, 2048)),
    ],
)
def test_own_defaults_are_those_of_vllm_on_the_gpu(profile: str, runner: str, expected: tuple[int, int]) -> None:
    assert limits(Simulation(profile=profile, own_defaults=True), runner=runner) == expected


def test_embeddings_need_a_pooling_engine() -> None:
    arguments = Simulation(profile="h100-8b").engine_args(WORKLOADS["embeddings"], REPORT)
    assert arguments["runner"] == "pooling"
    assert "enable_prefix_caching" not in arguments
