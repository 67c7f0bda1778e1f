"""``make bench``, or ``python -m tests.bench --lines 400``: see ``--help``.

``python -m tests.bench validation`` measures how fast input files are validated; it needs no engine.
"""

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ray_job.demo_model import make_demo_model
from tests.bench import validation
from tests.bench.measure import Result
from tests.bench.runners import MODEL_ID, RUNNERS, Setup
from tests.bench.workload import write_workload

# In float32 because bfloat16 is slower on most CPUs; a GPU's model wants its own (--engine-args).
ENGINE_ARGS = '{"dtype": "float32", "enforce_eager": true, "max_model_len": 2048}'
BUILD = Path("build")


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Compare cloister with its peers.")
    parser.add_argument("--lines", type=int, default=4000, help="lines of the file")
    parser.add_argument("--runs", type=int, default=1, help="runs of each runner, alternating")
    parser.add_argument("--model", default=str(BUILD / "demo_model"), help="a directory or a model id of vLLM")
    parser.add_argument("--engine-args", type=json.loads, default=ENGINE_ARGS, help="vLLM's arguments, as JSON")
    parser.add_argument("--runners", nargs="+", choices=RUNNERS, default=list(RUNNERS))
    parser.add_argument("--output", type=Path, default=BUILD / "bench.json")
    return parser.parse_args()


def main() -> None:
    """Runs everything in turn, prints one table and writes it as JSON."""
    given = options()
    directory = (BUILD / "bench").absolute()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    model = given.model
    if model == str(BUILD / "demo_model"):
        make_demo_model(Path(model))
    if Path(model).is_dir():
        model = str(Path(model).absolute())
    workload = directory / "input.jsonl"
    write_workload(workload, given.lines, MODEL_ID)
    setup = Setup(lines=given.lines, model=model, workload=workload, directory=directory, engine_args=given.engine_args)
    results: list[Result] = []
    for run in range(1, given.runs + 1):
        for name in given.runners:
            print(f"run {run} of {given.runs}: {name}, {given.lines} lines", flush=True)  # noqa: T201 - progress
            results.append(RUNNERS[name](setup, run))
            given.output.parent.mkdir(parents=True, exist_ok=True)
            given.output.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1) + "\n")
    print(table(results))  # noqa: T201 - the result


def table(results: Sequence[Result]) -> str:
    """The results as text, one line per run."""
    head = f"{'runner':<10} {'run':>3} {'total s':>9} {'first row s':>12} {'rows/s':>8} {'peak MB':>8}"
    rows = [
        f"{r.runner:<10} {r.run:>3} {r.total_s:>9.1f} {r.first_row_s:>12.1f} {r.rows_per_s:>8.1f} {r.peak_mb:>8.0f}"
        for r in sorted(results, key=lambda result: (result.runner, result.run))
    ]
    return "\n".join([head, *rows])


if __name__ == "__main__":
    if sys.argv[1:2] == ["validation"]:
        validation.main(sys.argv[2:])
    else:
        main()
