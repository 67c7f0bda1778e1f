"""The stages of a job, shared by all engine lanes.

    driver: input lines in execution order ▶ prepare (CPU) ▶ engine lane ▶ commit (CPU): one part per block
    ▶ driver: totals to Postgres

Every stage reserves its own resources in Ray: preparing and committing a fraction of a CPU, so that they
fit beside the engine on a small Ray and never wait for a GPU.
"""

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ray_job.contract.job_spec import EngineLane, JobSpec
from ray_job.contract.parts import PartHeader, Usage
from ray_job.engines.direct import direct_lane
from ray_job.input_lines import InputLines
from ray_job.object_store import read_chunks, read_part_headers, write_part
from ray_job.progress import ProgressReporter, Totals
from ray_job.rows import parse_request, part_row
from ray_job.weights import require_model

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import Dataset

logger = logging.getLogger(__name__)

Lane = Callable[[JobSpec, "Dataset"], "Dataset"]


def lane_function(lane: EngineLane) -> Lane:
    """The function that adds a lane's engine stage; only the chosen lane's libraries are imported."""
    if lane == "processor":
        from ray_job.engines.processor import processor_lane

        return processor_lane
    if lane == "serve":
        from ray_job.engines.serve import serve_lane

        return serve_lane
    if lane == "http":
        from ray_job.engines.http import http_lane

        return http_lane
    return direct_lane


def prepare(table: "pa.Table") -> "pa.Table":
    """Raw lines to requests: ``{line, raw}`` → ``{line, custom_id, url, body}``."""
    import pyarrow as pa

    requests = [
        parse_request(line, raw) for line, raw in zip(table["line"].to_pylist(), table["raw"].to_pylist(), strict=True)
    ]
    return pa.table(
        {
            "line": pa.array([request.line for request in requests], pa.int64()),
            "custom_id": pa.array([request.custom_id for request in requests], pa.string()),
            "url": pa.array([request.url for request in requests], pa.string()),
            "body": pa.array([request.body for request in requests], pa.binary()),
        }
    )


def commit(table: "pa.Table", *, spec: JobSpec) -> "pa.Table":
    """Writes a block of responses as one part and gives its totals, one row."""
    import pyarrow as pa

    columns = (table[name].to_pylist() for name in ("line", "custom_id", "status_code", "response_body"))
    rows = [part_row(spec.batch_id, *row) for row in zip(*columns, strict=True)]
    if rows:
        write_part(spec.object_store, spec.batch_id, rows)
    usage = sum((row.usage for row in rows), Usage())
    completed = sum(row.outcome == "completed" for row in rows)
    totals = {
        "completed": completed,
        "failed": len(rows) - completed,
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cached_tokens": usage.cached_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
    }
    return pa.table({name: pa.array([value], pa.int64()) for name, value in totals.items()})


def build(spec: JobSpec, blocks: "Iterable[pa.Table]") -> "Dataset":
    """The whole dataset, not yet run: blocks of ``{line, raw}`` in, one row of totals per part out."""
    import ray

    raw = ray.data.from_arrow_refs([ray.put(block) for block in blocks])
    cpu_stage: dict[str, Any] = {
        "batch_size": None,
        "batch_format": "pyarrow",
        "num_cpus": spec.model.stage_num_cpus,
    }
    requests = raw.map_batches(prepare, **cpu_stage)
    responses = lane_function(spec.model.lane)(spec, requests)
    return responses.map_batches(commit, fn_kwargs={"spec": spec}, **cpu_stage)


def committed_totals(headers: Iterable[PartHeader]) -> tuple[set[int], Totals]:
    """The lines that earlier attempts committed, and their totals. A line in two parts counts once."""
    lines: set[int] = set()
    completed = failed = 0
    usage = Usage()
    for header in headers:
        for line, outcome, row_usage in zip(header.lines, header.outcomes, header.usage, strict=True):
            if line in lines:
                continue
            lines.add(line)
            completed += outcome == "completed"
            failed += outcome == "failed"
            usage += row_usage
    return lines, Totals(completed=completed, failed=failed, usage=usage)


def run(spec: JobSpec, progress: ProgressReporter) -> Totals:
    """Runs every line that is not committed yet and returns the batch's totals.

    Raises:
        JobError: see ``ray_job.errors``.
    """
    require_model(spec.model.source)
    committed, totals = committed_totals(read_part_headers(spec.object_store, spec.batch_id))
    with InputLines(read_chunks(spec.object_store, spec.input_key), committed) as lines:
        logger.info("%s lines to run, %s committed by earlier attempts", len(lines), len(committed))
        progress.report(totals, final=True)
        if not len(lines):
            return totals
        dataset = build(spec, map(_raw_block, lines.blocks(spec.model.batch_size)))
    for row in dataset.iter_rows():
        totals += Totals(
            completed=row["completed"],
            failed=row["failed"],
            usage=Usage(
                input_tokens=row["input_tokens"],
                output_tokens=row["output_tokens"],
                cached_tokens=row["cached_tokens"],
                reasoning_tokens=row["reasoning_tokens"],
            ),
        )
        progress.report(totals)
    progress.report(totals, final=True)
    return totals


def _raw_block(block: list[tuple[int, bytes]]) -> "pa.Table":
    import pyarrow as pa

    return pa.table(
        {
            "line": pa.array([line for line, _ in block], pa.int64()),
            "raw": pa.array([raw for _, raw in block], pa.binary()),
        }
    )
