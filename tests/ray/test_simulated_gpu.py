"""The simulated GPU in the real engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.figures import device_figures
from tests.bench.processes import run_environment
from tests.bench.simulated_gpu.device_report import read_reports
from tests.bench.simulation import Simulation, make_simulated_model
from tests.bench.workloads import WORKLOADS, write_workload

LINES = 120
LOGNORMAL = WORKLOADS["lognormal"]


@pytest.mark.ray
def test_preempted_rows_get_every_token_once(tmp_path: Path, demo_model: Path) -> None:
    """More rows run than the KV cache of an A10G holds, so some lose their place in it and start again."""
    make_simulated_model(tmp_path / "model", demo_model)
    write_workload(tmp_path / "input.jsonl", "lognormal", LINES, model="bench")
    asked = {}
    for text in (tmp_path / "input.jsonl").read_text().splitlines():
        line = json.loads(text)
        asked[line["custom_id"]] = line["body"]["max_tokens"]
    arguments = Simulation(profile="a10g-8b", clock_rate=40).engine_args(LOGNORMAL, tmp_path / "devices")
    arguments |= {"model": str(tmp_path / "model"), "max_num_seqs": 256}
    program = ["-m", "tests.bench.engine_limit", str(tmp_path / "input.jsonl"), str(tmp_path / "output.jsonl")]
    environment, _ = run_environment()
    subprocess.run([sys.executable, *program, json.dumps(arguments)], env=environment, check=True, timeout=300)
    answers = [json.loads(line) for line in (tmp_path / "output.jsonl").read_text().splitlines()]
    assert {answer["custom_id"]: answer["tokens"] for answer in answers} == asked
    figures = device_figures(read_reports(tmp_path / "devices"))
    assert (figures.finished_rows, figures.generated_tokens) == (LINES, sum(asked.values()))
    assert figures.preemptions > 0
