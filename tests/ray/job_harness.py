"""Runs `python -m ray_job` with its own Ray and reads the parts that it committed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_job.contract.job_spec import ENVIRONMENT_VARIABLE, JobSpec, ModelSpec, ObjectStoreLocation
from ray_job.contract.object_keys import file_key, parts_prefix
from ray_job.contract.parts import decode_header

BATCH_ID = "batch_test"
# system_fingerprint is a hash of the engine arguments; vLLM's programs differ in their default of max_num_seqs.
ENGINE_ARGS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "max_num_seqs": 128}
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A committed row."""

    line: int
    outcome: str
    status: int
    body: dict[str, Any]
    custom_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A batch in its own directory store, and the job spec that runs it."""

    root: Path
    spec: JobSpec
    environment: Mapping[str, str]

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """Start `python -m ray_job`, which ends with the block at the latest."""
        with subprocess.Popen(
            [sys.executable, "-m", "ray_job"],
            cwd=REPOSITORY,
            env={**self.environment, ENVIRONMENT_VARIABLE: self.spec.to_json()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def run(self) -> tuple[int, str]:
        """Run the job to its end, and return its exit code and output."""
        with self.running() as process:
            output, _ = process.communicate(timeout=600)
        return process.returncode, output

    def parts(self) -> list[Path]:
        """Return the part objects, oldest first."""
        folder = self.root / parts_prefix(BATCH_ID)
        return sorted(folder.glob("*.part"), key=lambda path: path.stat().st_mtime) if folder.exists() else []

    def rows(self) -> list[Row]:
        """Return every committed row, in the order of the input."""
        rows = [row for part in self.parts() for row in _rows_of(part)]
        return sorted(rows, key=lambda row: row.line)


def _rows_of(part: Path) -> Iterator[Row]:
    data = part.read_bytes()
    header = decode_header(data[: data.index(b"\n") + 1], part.name)
    for line, outcome, start, length in zip(
        header.lines, header.outcomes, header.offsets(), header.lengths, strict=True
    ):
        parsed = json.loads(data[start : start + length])
        yield Row(
            line=line,
            outcome=outcome,
            status=parsed["response"]["status_code"],
            body=parsed["response"]["body"],
            custom_id=parsed["custom_id"],
        )


MakeJob = Callable[..., Job]


def new_job(
    root: Path,
    temporary: Path,
    source: Path,
    bodies: Sequence[Mapping[str, Any]],
    endpoint: str = "/v1/chat/completions",
    **model: Any,
) -> Job:
    """Return a job for bodies in a directory store at ``root``; ``model`` holds fields of ModelSpec."""
    lines = (
        json.dumps({"custom_id": f"request-{number}", "method": "POST", "url": endpoint, "body": body})
        for number, body in enumerate(bodies, start=1)
    )
    input_object = root / file_key("file-input")
    input_object.parent.mkdir(parents=True)
    input_object.write_text("".join(f"{line}\n" for line in lines))
    spec = JobSpec(
        job_id=f"{BATCH_ID}-1",
        batch_id=BATCH_ID,
        attempt=1,
        endpoint=endpoint,
        input_key=file_key("file-input"),
        object_store=ObjectStoreLocation(kind="directory", root=str(root)),
        database_url="",
        model=ModelSpec(**{"id": "demo", "source": str(source), "engine_args": ENGINE_ARGS, **model}),
    )
    return Job(root=root, spec=spec, environment=job_environment(temporary))


def job_environment(temporary: Path) -> dict[str, str]:
    """Return the environment of a job: offline, without usage reports, and with its temporary files in one place."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return inherited | {
        "TMPDIR": str(temporary),
        "RAY_TMPDIR": str(temporary),
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "2",
    }


def chat(content: str, **fields: Any) -> dict[str, Any]:
    """Return a chat body with greedy sampling."""
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 8,
        **fields,
    }
