"""``make mutation``, or ``python -m tests.mutation contract --sample 100``: see ``--help``.

cosmic-ray creates the mutants. They replace the code in a copy of the checkout in ``build/mutation/``, where a forked
process runs the tests: the start of Python and pytest would take most of the time of a mutant. Of the replacements of
one operator, such as ``<`` by ``==``, ``<=`` and so on, one is tried.
"""

import argparse
import ast
import difflib
import importlib
import os
import random
import resource
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec

BUILD = Path("build/mutation")
GOAL_PERCENT = 85
SEED = 1
# A mutant may loop forever. The limit is CPU time, because a busy machine must not turn survivors into timeouts.
CPU_LIMIT_S = 30
# Imported once, before the forks. They must not import the mutated code.
PRELOADED = ("hypothesis", "orjson", "psycopg", "psycopg_pool", "pydantic", "structlog", "yaml")
# Without plugins and settings, which no test of these areas needs.
PYTEST = ["-c/dev/null", "--rootdir=.", "--import-mode=importlib", "-pno:cacheprovider", "-qx", "--tb=no"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """Code, and the fast tests that cover it. Both are patterns of paths."""

    code: tuple[str, ...]
    tests: tuple[str, ...]


AREAS: Mapping[str, Area] = {
    "contract": Area(
        code=("ray_job/contract/*.py",),
        tests=(
            "tests/unit/test_parts.py",
            "tests/unit/test_lines.py",
            "tests/unit/test_engine_support.py",
            "tests/unit/test_job_spec.py",
            "tests/unit/test_rayjobs.py",
            "tests/unit/test_accelerator_support.py",
            "tests/unit/test_weights_copy.py",
            "tests/unit/test_split_lines.py",
        ),
    ),
    "transitions": Area(
        code=("service/transitions.py", "service/job_transitions.py"),
        tests=("tests/unit/test_transitions.py", "tests/unit/test_job_transitions.py"),
    ),
    # Without the properties, whose examples take longer than all other tests together.
    "input_file": Area(
        code=("service/input_file/*.py",),
        tests=(
            "tests/unit/test_input_file.py",
            "tests/unit/test_input_file_defects.py",
            "tests/unit/test_input_file_fast_path.py",
            "tests/unit/test_input_file_privacy.py",
        ),
    ),
    "stack_file": Area(
        code=("infra/stack_file/rules.py",), tests=("tests/infra/test_config*.py", "tests/infra/test_models.py")
    ),
}


def main() -> int:
    """Run the areas, print the rates, and return 1 if an area misses the goal."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description="Test the tests with mutants.")
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(AREAS)}; all by default")
    parser.add_argument("--sample", type=int, help="mutants of each area to try, chosen at random with a fixed seed")
    options = parser.parse_args()
    rates = {}
    for name in options.areas or AREAS:
        killed, survived = run(name, AREAS[name], options.sample)
        rates[name] = 100 * killed / max(1, killed + survived)
        print(f"{name}: {killed} killed, {survived} survived: {rates[name]:.1f} %", flush=True)  # noqa: T201 - the result
    return int(min(rates.values()) < GOAL_PERCENT)


def run(name: str, area: Area, sample: int | None) -> tuple[int, int]:
    """Try the mutants of an area, and print each survivor.

    Returns:
        The numbers of mutants that the tests noticed and of the others. Mutants that cannot be imported do not count.
    """
    killed = survived = 0
    with copied_checkout(BUILD.absolute() / name):
        tests = sorted(str(path) for pattern in area.tests for path in Path().glob(pattern))
        if run_tests(tests) != pytest.ExitCode.OK:
            raise RuntimeError(f"the tests of {name} fail without a mutant: {' '.join(tests)}")
        modules = sorted(path for pattern in area.code for path in Path().glob(pattern) if path.name != "__init__.py")
        mutants = chosen_mutants(modules, sample)
        for number, mutant in enumerate(mutants, start=1):
            code = mutant.module_path.read_text()
            mutated = mutate_code(code, get_operator(mutant.operator_name)(), mutant.occurrence)
            mutant.module_path.write_text(mutated)
            try:
                exit_code = run_tests(tests)
            finally:
                mutant.module_path.write_text(code)
            if exit_code == pytest.ExitCode.OK:
                diff = difflib.unified_diff(code.splitlines(), mutated.splitlines(), lineterm="", n=0)
                change = "\n".join(line for line in diff if not line.startswith(("---", "+++", "@@")))
                place = f"{mutant.module_path}:{mutant.start_pos[0]}"
                print(f"{number}/{len(mutants)} survived: {place}\n{change}", flush=True)  # noqa: T201 - the result
                survived += 1
            elif exit_code != pytest.ExitCode.INTERRUPTED:
                killed += 1
    return killed, survived


def run_tests(tests: Sequence[str]) -> int:
    """Run tests in a forked process, and return pytest's exit code. A mutant that exceeds its CPU time is a failure."""
    process = os.fork()
    if process == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os._exit(pytest.main([*PYTEST, *tests]))
    _, status = os.waitpid(process, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else pytest.ExitCode.TESTS_FAILED


def chosen_mutants(modules: Sequence[Path], sample: int | None) -> list[MutationSpec]:
    """Return one mutant for each operator in the code, or ``sample`` of those.

    Only code inside functions is changed. What is outside is data, such as constants, tables and defaults of fields,
    and a test of data repeats it.
    """
    variants = defaultdict(list)
    with use_db(":memory:") as database:
        init(modules, database, {})
        mutants = sorted((item.mutations[0] for item in database.work_items), key=str)
    bodies = {module: function_lines(module) for module in modules}
    for mutant in mutants:
        if mutant.start_pos[0] not in bodies[mutant.module_path]:
            continue
        kind = "_".join(mutant.operator_name.split("_")[:2])
        variants[str(mutant.module_path), kind, mutant.start_pos].append(mutant)
    choose = random.Random(SEED)  # noqa: S311 - no secret
    chosen = [choose.choice(same) for same in variants.values()]
    return choose.sample(chosen, sample) if sample is not None and sample < len(chosen) else chosen


def function_lines(module: Path) -> set[int]:
    """Return the lines of all functions of a module, without their decorators and parameters."""
    functions = [
        node
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {line for function in functions for line in range(function.body[0].lineno, (function.end_lineno or 0) + 1)}


@contextmanager
def copied_checkout(root: Path) -> Iterator[None]:
    """Copy the checkout without ignored files to ``root``, and work there."""
    shutil.rmtree(root, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], check=True, stdout=subprocess.PIPE
    ).stdout.decode()
    for name in filter(os.path.exists, listed.split("\0")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(name, root / name)
    before, path = Path.cwd(), list(sys.path)
    # Bytecode of one mutant would hide the next one.
    sys.dont_write_bytecode = True
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(root)}
    sys.path[:] = [str(root), *(entry for entry in path if entry not in ("", str(before)))]
    os.chdir(root)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path


if __name__ == "__main__":
    for library in PRELOADED:
        importlib.import_module(library)
    sys.exit(main())
