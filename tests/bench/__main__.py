"""``make bench``: measure a selection of cases and compare the figures with the bars. See ``--help``.

python -m tests.bench                      the selection: ten minutes on two idle cores
python -m tests.bench --full               all cases; hours
python -m tests.bench --cases prefix-a10g  some cases of all
python -m tests.bench compare              run_batch, ray.data.llm and cloister on a model of your choice
python -m tests.bench validation           the validation of input files, without an engine
python -m tests.bench calibrate            the figures of a profile, measured on a real GPU
python -m tests.bench control-plane        the service under load, with simulated jobs
python -m tests.bench fairness             the shares of two busy projects, with simulated jobs
python -m tests.bench chaos                random kills on a local stack that runs batches
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_job.demo_model import make_demo_model
from tests.bench import calibration, chaos, validation
from tests.bench.assembly import assembly_seconds
from tests.bench.bars import BARS, Measured, starved
from tests.bench.cases import CPU_ENGINE_ARGS, FULL, SELECTION, Case
from tests.bench.control_plane import fairness
from tests.bench.control_plane import run as control_plane
from tests.bench.figures import block_hits
from tests.bench.measure import Result
from tests.bench.report import chart, markdown
from tests.bench.runners import MODEL_ID, RUNNERS, Setup
from tests.bench.simulation import make_simulated_model
from tests.bench.workloads import write_workload

BUILD = Path("build")
DEMO_MODEL = BUILD / "demo_model"
BLOCK_TOKENS = 16


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="measure all cases")
    parser.add_argument("--cases", nargs="+", choices=FULL, help="measure these cases of --full")
    parser.add_argument("--runs", type=int, help="rounds of each case, instead of its own number")
    parser.add_argument("--lines", type=int, help="lines of each file, instead of its own number")
    parser.add_argument("--runners", nargs="+", choices=RUNNERS, help="only these runners")
    parser.add_argument("--clock-rate", type=float, help="simulated seconds per second, for all simulated devices")
    parser.add_argument("--seed", type=int, default=1, help="seed of all files")
    parser.add_argument("--directory", type=Path, default=BUILD, help="where the results go")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measure the cases, write the results, and print the tables and one line for each bar."""
    given = options(arguments)
    cases = {name: FULL[name] for name in given.cases} if given.cases else FULL if given.full else SELECTION
    work = (given.directory / "bench").absolute()
    work.mkdir(parents=True, exist_ok=True)
    make_demo_model(DEMO_MODEL)
    make_simulated_model(work / "simulated-model", DEMO_MODEL)
    results: list[Result] = []
    for name, case in cases.items():
        if given.clock_rate and case.simulation:
            simulation = dataclasses.replace(case.simulation, clock_rate=given.clock_rate)
            case = dataclasses.replace(case, simulation=simulation)  # noqa: PLW2901 - the case as it is measured
        setup = prepare(name, case, work, lines=given.lines or case.lines, seed=given.seed)
        runners = [runner for runner in case.runners if given.runners is None or runner in given.runners]
        results += measure_case(setup, runners, given.runs or case.runs)
        write(given.directory, results)
    measured = Measured(
        results=results,
        best_hit_rates={name: best_hit_rate(work / f"{name}.jsonl") for name in cases if "prefix" in name},
        asked_tokens={name: asked_tokens(work / f"{name}.jsonl") for name in cases if cases[name].simulation},
        assembly_s=assembly_seconds(),
    )
    print(markdown(results, machine=machine()))
    wanted = [bar for bar in BARS if set(bar.cases) <= set(cases)]
    verdicts = [bar.verdict(measured) for bar in wanted]
    notes = starved(results)
    if given.lines or given.runners or given.clock_rate:
        notes.append("the bars are meant for the cases as they are, which the command line changed")
    if len(wanted) < len(BARS):
        notes.append(f"{len(BARS) - len(wanted)} more bars need other cases: make bench-full")
    lines = [line for _, line in verdicts]
    write(given.directory, results, bars=lines)
    print("\n".join([*notes, *lines]))
    return 0 if all(passed for passed, _ in verdicts) else 1


def prepare(name: str, case: Case, work: Path, *, lines: int, seed: int) -> Setup:
    """Write the file of a case and return its setup."""
    path = work / f"{name}.jsonl"
    write_workload(path, case.workload, lines, model=MODEL_ID, seed=seed)
    model = work / "simulated-model" if case.simulation else DEMO_MODEL
    return Setup(
        case=name,
        lines=lines,
        model=str(model.absolute()),
        workload=case.workload,
        input=path,
        directory=work,
        engine_args=case.engine_args,
        simulation=case.simulation,
        model_settings=case.model_settings,
        is_warm=case.is_warm,
    )


def measure_case(setup: Setup, runners: Sequence[str], runs: int) -> list[Result]:
    """Run the runners in turn. A runner that fails is reported and has no result."""
    by_arguments: dict[str, list[str]] = {}
    for runner in runners:
        arguments = json.dumps(setup.effective_arguments(Path("REPORT"), runner))
        by_arguments.setdefault(arguments, []).append(runner)
    for arguments, same in by_arguments.items():
        print(f"{setup.case}: engine arguments of {', '.join(same)}: {arguments}", flush=True)
    results = []
    for number in range(1, runs + 1):
        for runner in runners:
            try:
                result = RUNNERS[runner](setup, number)
            except (RuntimeError, OSError, StopIteration) as error:
                print(f"{setup.case}, run {number}, {runner}: {error}", flush=True)
                continue
            rate = f"{result.lines / result.device.seconds:.1f} rows/s simulated, " if result.device else ""
            print(f"{setup.case}, run {number}, {runner}: {rate}{result.total_s} s in all", flush=True)
            results.append(result)
    return results


def write(directory: Path, results: Sequence[Result], *, bars: Sequence[str] = ()) -> None:
    """Write the results and the verdicts on the bars as JSON, the tables as Markdown and the chart."""
    content = {"machine": machine(), "bars": bars, "results": [dataclasses.asdict(result) for result in results]}
    (directory / "bench.json").write_text(json.dumps(content, indent=1) + "\n")
    (directory / "bench.md").write_text(markdown(results, machine=machine()))
    (directory / "bench.svg").write_text(chart(results))


def machine() -> str:
    """Return the processors of this machine and its load."""
    return f"{os.cpu_count()} cores, load average {os.getloadavg()[1]:.1f}"


def bodies(path: Path) -> "list[Mapping[str, Any]]":
    """Return the bodies of a file."""
    return [json.loads(line)["body"] for line in path.read_text().splitlines()]


def asked_tokens(path: Path) -> int:
    """Return the tokens that the lines of a file ask for."""
    return sum(body.get("max_tokens", 0) for body in bodies(path))


def best_hit_rate(path: Path) -> float:
    """Return the hit rate of the prefix cache if every block of tokens were computed once."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    prompts = (
        tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        for body in bodies(path)
    )
    tokens = (tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"] for prompt in prompts)
    return block_hits(tokens, block_size=BLOCK_TOKENS)


def compare(arguments: Sequence[str]) -> None:
    """Run one file of fixed lengths through the runners, on the device of this machine."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench compare", description="Compare cloister with its peers."
    )
    parser.add_argument("--lines", type=int, default=4000, help="lines of the file")
    parser.add_argument("--runs", type=int, default=1, help="runs of each runner, alternating")
    parser.add_argument("--model", default=str(DEMO_MODEL), help="a directory or a model id of vLLM")
    # For a model on a GPU pass --engine-args '{}'.
    parser.add_argument("--engine-args", type=json.loads, default=CPU_ENGINE_ARGS, help="vLLM's arguments, as JSON")
    parser.add_argument("--workload", default="fixed", help="the workload")
    parser.add_argument("--runners", nargs="+", choices=RUNNERS, default=["run_batch", "stock", "cloister"])
    given = parser.parse_args(arguments)
    work = (BUILD / "bench").absolute()
    work.mkdir(parents=True, exist_ok=True)
    if given.model == str(DEMO_MODEL):
        make_demo_model(DEMO_MODEL)
    path = work / "compare.jsonl"
    write_workload(path, given.workload, given.lines, model=MODEL_ID)
    model = str(Path(given.model).absolute()) if Path(given.model).is_dir() else given.model
    setup = Setup(
        case="compare",
        lines=given.lines,
        model=model,
        workload=given.workload,
        input=path,
        directory=work,
        engine_args=given.engine_args,
    )
    results = measure_case(setup, given.runners, given.runs)
    write(BUILD, results)
    print(markdown(results, machine=machine()))


if __name__ == "__main__":
    commands = {"compare": compare, "validation": validation.main, "calibrate": calibration.main}
    checks = {"control-plane": control_plane.main, "fairness": fairness.main, "chaos": chaos.main}
    if sys.argv[1:2] and sys.argv[1] in checks:
        sys.exit(checks[sys.argv[1]](sys.argv[2:]))
    elif sys.argv[1:2] and sys.argv[1] in commands:
        commands[sys.argv[1]](sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
