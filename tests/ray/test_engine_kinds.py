"""The processor, serve and http engines on a real Ray with a real engine, each with rows that fail."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_job.contract.job_spec import ModelSpec
from ray_job.engines.engine_args import engine_flags, server_args
from ray_job.rows import NO_RESPONSE
from tests.ray.fidelity.compare import differences
from tests.ray.fidelity.oracle import http_server
from tests.ray.job_harness import BATCH_ID, ENGINE_ARGS, Job, MakeJob, Row, chat, descendants, new_job

pytestmark = pytest.mark.ray

GOOD = 26
BAD_BODIES = [
    chat("too hot", temperature=-1),
    chat("word " * 3_000),
    {"model": "demo", "temperature": 0},
    chat("not a number", max_tokens="many"),
]


def _bodies() -> list[dict[str, Any]]:
    varied = [{}, {"stop": ["e"]}, {"presence_penalty": 0.8}, {"max_tokens": 3}, {"top_k": 5}]
    return [*(chat(f"Question {n}", **varied[n % len(varied)]) for n in range(GOOD)), *BAD_BODIES]


def _run_and_check_statuses(job: Job) -> list[Row]:
    exit_code, output = job.run()
    assert exit_code == 0, output
    return _checked_statuses(job)


def _checked_statuses(job: Job) -> list[Row]:
    rows = job.rows()
    assert [row.line for row in rows] == list(range(1, GOOD + len(BAD_BODIES) + 1))
    assert [row.status for row in rows] == [200] * GOOD + [400] * len(BAD_BODIES)
    assert all(set(row.body["error"]) == {"message", "type", "param", "code"} for row in rows[GOOD:])
    return rows


def _unequal(rows: list[Row], reference: list[Row]) -> dict[int, list[str]]:
    found = {row.line: list(differences(one.body, row.body)) for row, one in zip(rows, reference, strict=True)}
    return {line: paths for line, paths in found.items() if paths}


@pytest.fixture(scope="module")
def reference(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Row]]:
    """Rows of the direct engine."""
    with (
        tempfile.TemporaryDirectory(prefix="cl-") as temporary,
        new_job(tmp_path_factory.mktemp("store"), Path(temporary), demo_model, _bodies(), batch_size=8) as job,
    ):
        yield _run_and_check_statuses(job)


def test_serve_engine_returns_the_bodies_of_the_direct_engine_and_stays_for_the_next_batch(
    reference: list[Row], make_job: MakeJob
) -> None:
    job = make_job(_bodies(), engine="serve", batch_size=8, keep_warm_s=600)
    with job.running() as process:
        job.wait_for_rows(process, 0)
        replicas = descendants(process, "ServeReplica:cloister")
        job.add_batch([chat("Hello")], batch_id="batch_late")
        job.wait_for_rows(process, 0)
        assert replicas
        assert descendants(process, "ServeReplica:cloister") == replicas
        job.server.change(drain=True)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert [row.status for row in job.rows("batch_late")] == [200]
    assert _unequal(_checked_statuses(job), reference) == {}


def test_http_engine_returns_the_bodies_of_its_endpoint(
    reference: list[Row], make_job: MakeJob, demo_model: Path, short_directory: Path
) -> None:
    flags = engine_flags(server_args(ModelSpec(id="demo", source=str(demo_model), engine_args=ENGINE_ARGS)))
    with http_server(flags, short_directory, port=8531):
        job = make_job(_bodies(), engine="http", batch_size=8, base_url="http://127.0.0.1:8531/v1")
        others = [chat(f"Other {n}") for n in range(13)]
        job.add_batch(others, batch_id="batch_other", segment_rows=5, twins={2: (14, 15)})
        rows = _run_and_check_statuses(job)
        assert [(row.line, row.status) for row in job.rows("batch_other")] == [(n, 200) for n in range(1, 16)]
    assert all(part.times[0].sent_s > part.times[0].ready_s for _, part in job.coordinator.commits)
    assert _unequal(rows, reference) == {}


def test_unreachable_http_endpoint_fails_the_job_with_its_address(make_job: MakeJob) -> None:
    job = make_job([chat("Hello")], engine="http", base_url="http://127.0.0.1:9/v1")
    exit_code, output = job.run()
    assert exit_code == 1
    assert "http://127.0.0.1:9/v1/chat/completions did not answer" in output


def test_processor_engine_returns_the_texts_and_usage_of_the_direct_engine(
    reference: list[Row], make_job: MakeJob
) -> None:
    rows = _run_and_check_statuses(make_job(_bodies(), engine="processor", batch_size=8))
    assert [_comparable_fields(row) for row in rows[:GOOD]] == [_comparable_fields(row) for row in reference[:GOOD]]


@pytest.mark.parametrize("engine", ["processor", "serve"])
def test_engine_gives_up_a_line_that_takes_too_long(make_job: MakeJob, engine: str) -> None:
    endless = chat("Go on", max_tokens=2_000, ignore_eos=True)
    exit_code, output = (job := make_job([endless], engine=engine, request_timeout_s=0.5)).run()
    assert exit_code == 0, output
    (row,) = job.rows()
    assert (row.status, row.body["error"]["code"]) == (NO_RESPONSE, "request_timeout")


def test_processor_engine_returns_embeddings(make_job: MakeJob) -> None:
    bodies = [{"model": "demo", "input": f"Text {n}"} for n in range(5)] + [{"model": "demo", "input": ""}]
    job = make_job(bodies, endpoint="/v1/embeddings", engine="processor")
    exit_code, output = job.run()
    assert exit_code == 0, output
    rows = job.rows()
    assert [row.status for row in rows] == [200] * 5 + [400]
    assert [len(row.body["data"][0]["embedding"]) for row in rows[:5]] == [256] * 5


def _comparable_fields(row: Row) -> dict[str, Any]:
    choice, usage = row.body["choices"][0], row.body["usage"]
    return {
        "text": choice["message"]["content"],
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
        "usage": {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
    }


def test_line_that_is_not_a_request_is_given_back_without_its_content(make_job: MakeJob) -> None:
    job = make_job([chat("SECRET")], engine="http", base_url="http://127.0.0.1:9/v1")
    plan = job.coordinator.root / f"batches/{BATCH_ID}/plan"
    plan.write_bytes(plan.read_bytes().replace(b'"request-1"', b'["request"]'))
    exit_code, output = job.run()
    assert exit_code == 0, output
    (segment,) = job.coordinator.segments
    assert len(segment.failures) == 4
    assert segment.failures[0].startswith("line 1 of the input is not a request (TypeError)")
    assert "SECRET" not in output
    assert "Traceback" not in output
