"""The direct lane on a real Ray with a real engine: answers, resume, and a death in the middle."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ray_job.contract.exit_codes import EXIT_NO_MODEL
from ray_job.contract.job_spec import JobSpec
from tests.ray.job_harness import Job, MakeJob, chat

pytestmark = pytest.mark.ray


def test_every_line_is_answered_once_and_the_statuses_are_the_engines(make_job: MakeJob, tmp_path: Path) -> None:
    bodies = [chat(f"Question {n}") for n in range(20)] + [chat("too hot", temperature=-1), {"model": "demo"}]
    job = make_job(bodies, batch_size=5)
    cache = tmp_path / "vllm-cache"
    job = replace(job, environment={**job.environment, "VLLM_CACHE_ROOT": str(cache)})
    exit_code, output = job.run()
    assert exit_code == 0, output
    # There vLLM writes down what it had to start another Python for.
    assert not (cache / "modelinfos").exists()
    rows = job.rows()
    assert [row.line for row in rows] == list(range(1, 23))
    assert [row.status for row in rows[-2:]] == [400, 400]
    assert {row.outcome for row in rows[:20]} == {"completed"}
    assert all(set(row.body["error"]) == {"message", "type", "param", "code"} for row in rows[-2:])


def test_a_second_run_generates_only_what_is_not_committed(make_job: MakeJob) -> None:
    job = make_job([chat(f"Question {n}") for n in range(12)], batch_size=4)
    assert job.run()[0] == 0
    kept, removed = job.parts()[0], job.parts()[1:]
    before = kept.stat().st_mtime_ns
    for part in removed:
        part.unlink()
    exit_code, output = job.run()
    assert exit_code == 0
    assert "8 lines to run, 4 committed by earlier attempts" in output
    assert kept.stat().st_mtime_ns == before
    assert [row.line for row in job.rows()] == list(range(1, 13))


def test_an_engine_that_is_killed_in_the_middle_costs_no_row(make_job: MakeJob) -> None:
    job = make_job([chat(f"Question {n}", max_tokens=64) for n in range(200)], batch_size=16)
    process = job.start()
    try:
        _wait_for_parts(job, 2)
        engine = _descendant(process.pid, "VLLM::EngineCore")
        engine.kill()
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert [(row.line, row.status) for row in job.rows()] == [(n, 200) for n in range(1, 201)]


def test_a_request_that_ends_the_engine_becomes_an_error_row_and_the_others_are_answered(make_job: MakeJob) -> None:
    # A prompt of two chunks with a seed ends vLLM's CPU engine when chunked prefill is on.
    deadly = chat("word " * 300, seed=7, temperature=1)
    bodies = [chat(f"Question {n}") for n in range(20)]
    bodies.insert(9, deadly)
    engine_args = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 64,
    }
    job = make_job(bodies, engine_args=engine_args)
    exit_code, output = job.run()
    assert exit_code == 0, output
    rows = job.rows()
    assert [row.line for row in rows if row.outcome == "failed"] == [10]
    assert rows[9].status == 500
    assert rows[9].body["error"]["code"] == "engine_died"
    assert len(rows) == 21


def test_an_engine_that_cannot_start_fails_the_job_with_its_reason(make_job: MakeJob) -> None:
    job = make_job([chat("Hello")], engine_args={"max_model_len": 1_000_000, "dtype": "float32"})
    exit_code, output = job.run()
    assert exit_code == 1
    assert "before it was ready" in output.splitlines()[-1]
    assert "max_model_len" in output


def test_a_model_that_an_engines_node_could_not_get_ends_the_job_with_a_code_of_its_own(
    make_job: MakeJob, demo_model: Path, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    source.mkdir()
    for file in demo_model.iterdir():
        (source / file.name).symlink_to(file)
    job = make_job([chat("Hello")])
    process = replace(job, spec=replace(job.spec, model=replace(job.spec.model, source=str(source)))).start()
    assert process.stdout is not None
    # The driver has looked at its own model by then, and no engine at its.
    next(line for line in process.stdout if "lines to run" in line)
    (source / "no-model.txt").write_text("upload the model's directory")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == EXIT_NO_MODEL, output
    assert output.splitlines()[-1].endswith("upload the model's directory")


def test_a_job_that_is_terminated_leaves_no_engine_behind(make_job: MakeJob) -> None:
    job = make_job([chat(f"Question {n}", max_tokens=64) for n in range(200)], batch_size=16)
    process = job.start()
    _wait_for_parts(job, 1)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert [p.name() for p in alive] == []


def test_answers_do_not_depend_on_how_the_lines_are_batched(make_job: MakeJob) -> None:
    job = make_job([chat(f"Tell me about number {n}", max_tokens=16) for n in range(30)], batch_size=3)
    assert job.run()[0] == 0
    first = [_without_volatile(row.body) for row in job.rows()]
    for part in job.parts():
        part.unlink()
    again = Job(root=job.root, spec=_with_batch_size(job, 30), environment=job.environment)
    assert again.run()[0] == 0
    assert [_without_volatile(row.body) for row in again.rows()] == first


def _without_volatile(body: dict[str, object]) -> str:
    return json.dumps({key: value for key, value in body.items() if key not in ("id", "created")})


def _with_batch_size(job: Job, batch_size: int) -> JobSpec:
    return replace(job.spec, model=replace(job.spec.model, batch_size=batch_size))


def _wait_for_parts(job: Job, count: int) -> None:
    deadline = time.monotonic() + 240
    while len(job.parts()) < count:
        assert time.monotonic() < deadline, "no part was committed in time"
        time.sleep(0.1)


def _descendant(pid: int, name: str) -> psutil.Process:
    return next(p for p in psutil.Process(pid).children(recursive=True) if any(name in word for word in p.cmdline()))
