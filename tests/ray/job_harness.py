"""Runs `python -m ray_job` with its own Ray and a coordinator in memory, and reads the parts that it committed."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ray_job.contract.job_spec import ENVIRONMENT_VARIABLE, JobSpec, ModelSpec
from ray_job.contract.leases import TOKEN_VARIABLE
from ray_job.contract.parts import decode_header
from ray_job.contract.plans import PlanRow
from ray_job.rows import NO_RESPONSE
from tests.memory_coordinator import TOKEN, CoordinatorServer, MemoryCoordinator

BATCH_ID = "batch_test"
CHAT = "/v1/chat/completions"
WAIT_S = 300
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
    """A job, and the coordinator with its batches."""

    server: CoordinatorServer
    spec: JobSpec
    environment: Mapping[str, str]

    @property
    def coordinator(self) -> MemoryCoordinator:
        return self.server.coordinator

    def add_batch(
        self,
        bodies: Sequence[Mapping[str, Any]],
        *,
        batch_id: str = BATCH_ID,
        endpoint: str = CHAT,
        twins: Mapping[int, Sequence[int]] | None = None,
        **plan: Any,
    ) -> None:
        """Offer a batch.

        Args:
            bodies: the bodies of its lines.
            batch_id: its id.
            endpoint: the endpoint of its lines.
            twins: further lines that share the answers of these, by line.
            plan: further arguments of ``MemoryCoordinator.add_batch``.
        """
        rows = plan_rows(bodies, endpoint, twins or {})
        self.coordinator.add_batch(batch_id, rows, endpoint=endpoint, **plan)
        self.server.change()

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """Start `python -m ray_job`, which ends with the block at the latest."""
        with subprocess.Popen(
            [sys.executable, "-m", "ray_job"],
            cwd=REPOSITORY,
            env={**self.environment, ENVIRONMENT_VARIABLE: self.spec.to_json(), TOKEN_VARIABLE: TOKEN},
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

    def parts(self, batch_id: str = BATCH_ID) -> list[Path]:
        """Return the recorded parts of a batch, oldest first."""
        return [self.coordinator.root / key for key in self.coordinator.parts if f"/{batch_id}/" in key]

    def rows(self, batch_id: str = BATCH_ID) -> list[Row]:
        """Return every committed row of a batch, in the order of the input."""
        refused = self.coordinator.refused
        rows = [
            row
            for part in self.parts(batch_id)
            for row in _rows_of(part)
            if row.line not in refused.get(str(part.relative_to(self.coordinator.root)), ())
        ]
        return sorted(rows, key=lambda row: row.line)

    def wait_for_rows(self, process: subprocess.Popen[str], left: int) -> None:
        """Wait until no more than so many rows are left to commit."""
        deadline = time.monotonic() + WAIT_S
        while self.coordinator.left > left:
            assert process.poll() is None, f"the job ended early: {process.communicate()[0]}"
            assert time.monotonic() < deadline, "the rows were not committed in time"
            time.sleep(0.01)


def plan_rows(bodies: Sequence[Mapping[str, Any]], endpoint: str, twins: Mapping[int, Sequence[int]]) -> list[PlanRow]:
    """Return the rows of a plan that keeps the order of the bodies."""
    lines = (
        json.dumps({"custom_id": f"request-{number}", "method": "POST", "url": endpoint, "body": body}).encode()
        for number, body in enumerate(bodies, start=1)
    )
    return [
        PlanRow(line=number, raw=line, twins=tuple((twin, f"request-{twin}") for twin in twins.get(number, ())))
        for number, line in enumerate(lines, start=1)
    ]


def _rows_of(part: Path) -> Iterator[Row]:
    data = part.read_bytes()
    header = decode_header(data[: data.index(b"\n") + 1], part.name)
    for line, outcome, start, length in zip(
        header.lines, header.outcomes, header.offsets(), header.lengths, strict=True
    ):
        parsed = json.loads(data[start : start + length])
        response = parsed["response"] or {"status_code": NO_RESPONSE, "body": {"error": parsed["error"]}}
        yield Row(
            line=line,
            outcome=outcome,
            status=response["status_code"],
            body=response["body"],
            custom_id=parsed["custom_id"],
        )


MakeJob = Callable[..., Job]


@contextmanager
def new_job(
    root: Path,
    temporary: Path,
    source: Path,
    bodies: Sequence[Mapping[str, Any]],
    endpoint: str = CHAT,
    **model: Any,
) -> Iterator[Job]:
    """Provide a job and a batch of bodies in a directory store at ``root``; ``model`` holds fields of ModelSpec."""
    with CoordinatorServer(root).running() as server:
        fields = {"id": "demo", "source": str(source), "engine_args": ENGINE_ARGS, "keep_warm_s": 0, **model}
        spec = JobSpec(job_id="job-1", coordinator_url=server.url, model=ModelSpec(**fields))
        job = Job(server=server, spec=spec, environment=job_environment(temporary))
        if bodies:
            job.add_batch(bodies, endpoint=endpoint)
        yield job


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


def descendants(job: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    """Return the processes of a job with this name in their command line."""
    found = []
    for process in psutil.Process(job.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any(name in word for word in process.cmdline()):
                found.append(process)
    return found
