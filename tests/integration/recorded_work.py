"""Work of jobs on batches, as the coordinator records it."""

from collections.abc import Sequence
from typing import Any

from ray_job.contract.job_spec import ModelSpec
from ray_job.contract.lines import error_body, response_line
from ray_job.contract.object_keys import part_key
from ray_job.contract.parts import PartRow, Usage, encode_part
from service.estimates import model_key
from service.ports import ObjectStore
from service.reconciler.finishing import finish
from service.reconciler.records import Batch, load_batch
from service.reconciler.steps import validate
from tests.integration.reconciler_harness import BATCH, Stack

KEY = model_key(ModelSpec(id="demo", source="x"))
JOB = "job-1"


def batch(stack: Stack, batch_id: str = BATCH) -> Batch:
    found = load_batch(stack.pool, batch_id)
    assert found is not None
    return found


def write_part(store: ObjectStore, batch_id: str, *lines: int, fails: bool = False) -> None:
    """Write a part that no record names, as jobs of an earlier version did."""
    body = error_body("no", type="x", param=None, code=None) if fails else b'{"object":"chat.completion"}'
    rows = [
        PartRow(
            line=number,
            outcome="failed" if fails else "completed",
            data=response_line(batch_id, number, f"id-{number}", 400 if fails else 200, body),
            usage=Usage(input_tokens=10, output_tokens=2),
        )
        for number in lines
    ]
    store.put(part_key(batch_id, lines), [encode_part(batch_id, rows)])


def accept(stack: Stack, *lines: bytes, batch_id: str = BATCH) -> None:
    """Create a batch, and accept it 60 s ago after a validation of 2 s."""
    stack.create(*lines, batch_id=batch_id)
    validate(stack.backends, batch(stack, batch_id))
    stack.sql(
        "UPDATE batches SET created_at = now() - interval '62 s', in_progress_at = now() - interval '60 s' "
        "WHERE id = %s",
        batch_id,
    )


def add_job(stack: Stack, job_id: str = JOB, *, launched_s_ago: int = 55, gpus: int = 0, engines: int = 2) -> None:
    """Add a job that runs since a second after its launch."""
    stack.sql(
        "INSERT INTO jobs (id, model, domain, model_key, token_sha256, gpus, engines, launched_at, running_since, "
        "                  draining_at) "
        "VALUES (%s, 'demo', 'p', %s, %s, %s, %s, now() - make_interval(secs => %s), "
        "        now() - make_interval(secs => %s) + interval '1 s', now())",
        job_id,
        KEY,
        job_id.encode(),
        gpus,
        engines,
        launched_s_ago,
        launched_s_ago,
    )


def add_part(
    stack: Stack,
    *lines: int,
    job_id: str | None = JOB,
    refused: Sequence[int] = (),
    batch_id: str = BATCH,
    work_s: float = 30,
) -> str:
    """Commit a part 10 s ago as a job and the coordinator do, after so much work; return its key."""
    write_part(stack.store, batch_id, *lines)
    key = part_key(batch_id, lines)
    stack.sql(
        "INSERT INTO parts (key, batch_id, job_id, accepted, refused_lines) VALUES (%s, %s, %s, '{true}', %s)",
        key,
        batch_id,
        job_id,
        list(refused),
    )
    stack.sql(
        "UPDATE batches SET first_leased_at = now() - make_interval(secs => 10 + %s), "
        "last_commit_at = now() - interval '10 s' WHERE id = %s",
        work_s,
        batch_id,
    )
    if job_id is not None:
        stack.sql("INSERT INTO job_batches (job_id, batch_id) VALUES (%s, %s) ON CONFLICT DO NOTHING", job_id, batch_id)
    return key


def end(stack: Stack, batch_id: str = BATCH) -> dict[str, Any]:
    """Assemble and end a batch, and return its row."""
    stack.sql("UPDATE batches SET status = 'finalizing', finalizing_at = now() WHERE id = %s", batch_id)
    finish(stack.backends, batch(stack, batch_id))
    return stack.batch(batch_id)
