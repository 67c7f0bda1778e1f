"""The direct engine on a real Ray with a real engine: answers, resumption, and the death of an engine."""

import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ray_job.contract.exit_codes import EXIT_NO_MODEL
from ray_job.contract.measurement import Measurement
from ray_job.contract.object_keys import batch_prompt_rules_key, measurement_key
from ray_job.contract.prompt_rules import PromptRules
from ray_job.object_store import write_part
from ray_job.rows import part_row
from service.prompts import PromptCounter
from tests.ray.job_harness import BATCH_ID, ENGINE_ARGS, Job, MakeJob, chat

pytestmark = pytest.mark.ray

WAIT_S = 300


def test_every_line_is_answered_once_with_the_engines_status(make_job: MakeJob, tmp_path: Path) -> None:
    bodies = [chat(f"Question {n}") for n in range(20)] + [chat("too hot", temperature=-1), {"model": "demo"}]
    job = make_job(bodies, batch_size=5)
    cache = tmp_path / "vllm-cache"
    job = replace(job, environment={**job.environment, "VLLM_CACHE_ROOT": str(cache)})
    exit_code, output = job.run()
    assert exit_code == 0, output
    # vLLM fills this directory when it inspects the model's class in another Python process.
    assert not (cache / "modelinfos").exists()
    rows = job.rows()
    assert [row.line for row in rows] == list(range(1, 23))
    assert [row.status for row in rows[-2:]] == [400, 400]
    assert {row.outcome for row in rows[:20]} == {"completed"}
    counter = PromptCounter(PromptRules.from_json((job.root / batch_prompt_rules_key(BATCH_ID)).read_bytes()))
    counts = [counter.count(job.spec.endpoint, body) for body in bodies[:20]]
    tokens = [row.body["usage"]["prompt_tokens"] for row in rows[:20]]
    assert [count and count.tokens for count in counts] == tokens
    measured = Measurement.from_json((job.root / measurement_key(BATCH_ID)).read_bytes())
    assert (measured.engines, measured.rows, measured.input_tokens) == (1, 22, sum(tokens))
    assert 0 < measured.engine_s <= measured.busy_s < 60
    assert all(set(row.body["error"]) == {"message", "type", "param", "code"} for row in rows[-2:])


def test_lines_in_a_committed_part_do_not_run_again(make_joining_job: MakeJob) -> None:
    job = make_joining_job([chat(f"Question {n}") for n in range(12)])
    rows = [
        part_row(BATCH_ID, line, f"request-{line}", 200, b'{"choices": [], "usage": {"prompt_tokens": 3}}')
        for line in (2, 3, 5, 7)
    ]
    write_part(job.spec.object_store, BATCH_ID, rows)
    (committed,) = job.parts()
    before = committed.stat().st_mtime_ns
    exit_code, output = job.run()
    assert exit_code == 0, output
    assert "8 lines to run, 4 committed by earlier attempts" in output
    assert "12 completed and 0 failed rows are committed" in output
    assert committed.stat().st_mtime_ns == before
    assert [row.line for row in job.rows()] == list(range(1, 13))


def test_killed_engine_among_two_costs_no_row(make_job: MakeJob) -> None:
    lines = 300  # more than ROWS_PER_ENGINE
    # Few rows at a time: the engine still has most of them to answer when the first part is committed.
    engine_args = {**ENGINE_ARGS, "max_num_seqs": 16}
    bodies = [chat(f"Question {n}", max_tokens=32) for n in range(lines)]
    job = make_job(bodies, batch_size=16, concurrency=2, engine_args=engine_args)
    with job.running() as process:
        engine = _wait_for_descendant(process, "VLLM::EngineCore")
        _wait_for_parts(job, process)
        engine.kill()
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert [(row.line, row.status) for row in job.rows()] == [(n, 200) for n in range(1, lines + 1)]


def test_equal_lines_have_one_answer(make_joining_job: MakeJob) -> None:
    job = make_joining_job([chat(f"Question {n % 3}") for n in range(9)])
    exit_code, output = job.run()
    assert exit_code == 0, output
    assert "6 of them share the answer of an equal line" in output
    rows = job.rows()
    assert [row.custom_id for row in rows] == [f"request-{n}" for n in range(1, 10)]
    assert len({row.body["id"] for row in rows}) == 3


def test_request_that_ends_the_engine_becomes_an_error_row(make_joining_job: MakeJob) -> None:
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
    job = make_joining_job(bodies, engine_args=engine_args)
    exit_code, output = job.run()
    assert exit_code == 0, output
    rows = job.rows()
    assert [row.line for row in rows if row.outcome == "failed"] == [10]
    assert rows[9].status == 500
    assert rows[9].body["error"]["code"] == "engine_died"
    assert len(rows) == 21


def test_engine_that_cannot_start_fails_the_job_with_its_reason(make_joining_job: MakeJob) -> None:
    job = make_joining_job([chat("Hello")], engine_args={"max_model_len": 1_000_000, "dtype": "float32"})
    exit_code, output = job.run()
    assert exit_code == 1
    assert "before it was ready" in output.splitlines()[-1]
    assert "max_model_len" in output


def test_model_missing_on_an_engines_node_ends_the_job_with_its_exit_code(
    make_joining_job: MakeJob, demo_model: Path, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    source.mkdir()
    for file in demo_model.iterdir():
        (source / file.name).symlink_to(file)
    job = make_joining_job([chat("Hello")])
    spec = replace(job.spec, model=replace(job.spec.model, source=str(source)))
    with replace(job, spec=spec).running() as process:
        assert process.stdout is not None
        # The driver has checked its own copy of the model by then, and no engine has.
        next(line for line in process.stdout if "lines to run" in line)
        (source / "no-model.txt").write_text("upload the model's directory")
        output, _ = process.communicate(timeout=600)
    assert process.returncode == EXIT_NO_MODEL, output
    assert output.splitlines()[-1].endswith("upload the model's directory")


def test_engine_runs_at_the_niceness_of_its_job(make_job: MakeJob) -> None:
    with make_job([chat("Hello")]).running() as process:
        engine = _wait_for_descendant(process, "ray_job.engines.engine_server")
        assert engine.nice() == psutil.Process(process.pid).nice()
        process.terminate()
        process.communicate(timeout=60)


def test_terminated_job_leaves_no_engine_behind(make_job: MakeJob) -> None:
    job = make_job([chat(f"Question {n}", max_tokens=64) for n in range(200)], batch_size=16)
    with job.running() as process:
        _wait_for_parts(job, process)
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.communicate(timeout=60)
        _, alive = psutil.wait_procs(family, timeout=30)
        assert [p.name() for p in alive] == []


def _wait_for_parts(job: Job, process: subprocess.Popen[str]) -> None:
    """Wait until a running job has committed a part."""
    deadline = time.monotonic() + WAIT_S
    while not job.parts():
        assert process.poll() is None, "the job ended before it committed a part"
        assert time.monotonic() < deadline, "no part was committed in time"
        time.sleep(0.1)


def _wait_for_descendant(job: subprocess.Popen[str], name: str) -> psutil.Process:
    """Wait until a running job has a process with this name in its command line."""
    deadline = time.monotonic() + WAIT_S
    while job.poll() is None and time.monotonic() < deadline:
        for process in psutil.Process(job.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if any(name in word for word in process.cmdline()):
                    return process
        time.sleep(0.1)
    raise AssertionError(f"no process {name} {'in time' if job.poll() is None else 'before the job ended'}")
