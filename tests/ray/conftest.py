"""A real Ray and a real vLLM engine for `python -m ray_job`, with a model created here."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ray_job.demo_model import make_demo_model
from tests.ray.job_harness import REPOSITORY, Job, MakeJob, new_job


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The small model, created once per checkout (or CLOISTER_TEST_MODEL)."""
    directory = Path(os.environ.get("CLOISTER_TEST_MODEL", REPOSITORY / "build" / "demo_model"))
    make_demo_model(directory)
    return directory


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A directory with a path short enough for Ray's sockets, removed afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="cl-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def make_job(demo_model: Path, tmp_path: Path, short_directory: Path) -> MakeJob:
    """Create a job for bodies: ``make_job(bodies, endpoint=…, **fields of ModelSpec)``."""

    def make(bodies: Sequence[Mapping[str, Any]], endpoint: str = "/v1/chat/completions", **model: Any) -> Job:
        return new_job(tmp_path, short_directory, demo_model, bodies, endpoint, **model)

    return make
