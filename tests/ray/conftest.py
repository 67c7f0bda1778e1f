"""A real Ray and a real vLLM engine for `python -m ray_job`, with a model created here."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_job.contract.ray_environment import RAY_ENVIRONMENT
from ray_job.demo_model import make_demo_model
from tests.ray.job_harness import CHAT, REPOSITORY, Job, MakeJob, job_environment, new_job


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The small model, created once per checkout (or CLOISTER_TEST_MODEL)."""
    directory = Path(os.environ.get("CLOISTER_TEST_MODEL", REPOSITORY / "build" / "demo_model"))
    make_demo_model(directory)
    return directory


@pytest.fixture(scope="session")
def running_ray() -> Iterator[dict[str, str]]:
    """The environment of jobs that join a running Ray, as they do in production."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        token = Path(directory) / "token"
        token.write_text(secrets.token_hex(32))
        access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        program = (
            "import ray; ray.init(include_dashboard=False, logging_level='ERROR');"
            "print(ray.get_runtime_context().gcs_address, flush=True); input()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program],
            # Workers run here too, and a test may allow them core files.
            cwd=directory,
            env=job_environment(Path(directory)) | RAY_ENVIRONMENT | access | {"PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            yield {**access, "RAY_ADDRESS": process.stdout.readline().strip()}
            process.communicate("\n", timeout=60)


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A directory with a path short enough for Ray's sockets, removed afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="cl-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def make_job(demo_model: Path, tmp_path: Path, short_directory: Path) -> Iterator[MakeJob]:
    """Create a job for bodies: ``make_job(bodies, endpoint=…, **fields of ModelSpec)``."""
    with ExitStack() as jobs:

        def make(bodies: Sequence[Mapping[str, Any]], endpoint: str = CHAT, **model: Any) -> Job:
            return jobs.enter_context(new_job(tmp_path, short_directory, demo_model, bodies, endpoint, **model))

        yield make


@pytest.fixture
def make_joining_job(make_job: MakeJob, running_ray: dict[str, str]) -> MakeJob:
    """Create a job like ``make_job``. It joins the Ray of all tests, so it starts sooner."""

    def make(*arguments: Any, **model: Any) -> Job:
        job = make_job(*arguments, **model)
        return replace(job, environment={**job.environment, **running_ray})

    return make
