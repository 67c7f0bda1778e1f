"""A run of a job: the lines that are left, an engine that answers them, and the totals of the batch.

The direct engine has its own actors; see ``ray_job.engines.direct``. The other engines are a stage of Ray Data:

    driver: input lines in execution order ▶ prepare (CPU) ▶ engine ▶ commit (CPU): one part per block
    ▶ driver: totals to Postgres

Each stage reserves its own resources in Ray. Preparing and committing reserve a fraction of a CPU, so that they fit
beside the engine on a small Ray and never wait for a GPU.
"""

import logging
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ray_job.contract.job_spec import JobSpec
from ray_job.contract.parts import Usage
from ray_job.engines.direct import DirectRun
from ray_job.input_lines import InputLines
from ray_job.object_store import read_chunks, read_part_headers, write_part
from ray_job.progress import ProgressReporter, Totals
from ray_job.rows import parse_request, part_row
from ray_job.weights import require_model

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa
    from ray.data import Dataset

logger = logging.getLogger(__name__)


def run(spec: JobSpec, progress: ProgressReporter) -> Totals:
    """Run every line that is not committed yet.

    Returns:
        The totals of the batch, with the lines that earlier attempts committed.

    Raises:
        JobError: see ``ray_job.errors``.
    """
    require_model(spec.model.source)
    committed: set[int] = set()
    totals, expected = Totals(), 0
    for header in read_part_headers(spec.object_store, spec.batch_id):
        for line, outcome, usage in zip(header.lines, header.outcomes, header.usage, strict=True):
            if line not in committed:  # a line in two parts counts once
                committed.add(line)
                totals += Totals(completed=outcome == "completed", failed=outcome == "failed", usage=usage)

    def report(part: Totals) -> None:
        nonlocal totals
        totals += part
        # The service finalizes the batch when the last line is reported, while this job is still ending.
        is_last = totals.completed + totals.failed == expected
        if is_last and spec.model.engine == "direct" and not committed:  # earlier attempts were not measured
            direct.write_measurement(lines, totals.usage)
        progress.report(totals, final=is_last)

    with DirectRun(spec, report) as direct:
        if spec.model.engine == "direct" and not committed:
            direct.start_engine()  # it loads its model while the input is read
        chunks = read_chunks(spec.object_store, spec.input_key)
        with InputLines(chunks, committed, merge_equal=spec.model.engine == "direct") as lines:
            logger.info("%s lines to run, %s committed by earlier attempts", lines.total, len(committed))
            if lines.total > len(lines):
                logger.info("%s of them share the answer of an equal line", lines.total - len(lines))
            expected = len(committed) + lines.total
            progress.report(totals, final=True)
            if len(lines) and spec.model.engine == "direct":
                direct.answer(lines)
            elif len(lines):
                for row in build_dataset(spec, lines).iter_rows():
                    tokens = {field.name: row.pop(field.name) for field in fields(Usage)}
                    report(Totals(**row, usage=Usage(**tokens)))
    progress.report(totals, final=True)
    return totals


def build_dataset(spec: JobSpec, lines: InputLines) -> "Dataset":
    """Build the dataset of a job without running it: blocks of lines in, one row of totals per part out."""
    import pyarrow as pa
    import ray

    logging.getLogger("ray.data").setLevel(logging.WARNING)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    blocks = (
        pa.table(
            {
                "line": pa.array([line for line, _ in block], pa.int64()),
                "raw": pa.array([raw for _, raw in block], pa.binary()),
            }
        )
        for block in lines.blocks(spec.model.call_rows)
    )
    cpu_stage: dict[str, Any] = {
        "batch_size": None,
        "batch_format": "pyarrow",
        "num_cpus": spec.model.stage_num_cpus,
    }
    # Only the libraries of the engine that runs are imported.
    add_engine: Callable[[JobSpec, Dataset], Dataset]
    match spec.model.engine:
        case "processor":
            from ray_job.engines.processor import processor_engine as add_engine
        case "serve":
            from ray_job.engines.serve import serve_engine as add_engine
        case _:
            from ray_job.engines.http import http_engine as add_engine
    requests = ray.data.from_arrow_refs([ray.put(block) for block in blocks]).map_batches(prepare, **cpu_stage)
    return add_engine(spec, requests).map_batches(commit, fn_kwargs={"spec": spec}, **cpu_stage)


def prepare(table: "pa.Table") -> "pa.Table":
    """Convert lines to requests: ``{line, raw}`` → ``{line, custom_id, url, body}``."""
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
    """Write a block of responses as one part, and return one row with its totals."""
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
