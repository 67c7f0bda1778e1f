"""The direct engine on a real Ray with a real engine: leases, answers, parts, and the death of an engine."""

import json
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ray_job.contract.exit_codes import EXIT_NO_MODEL
from ray_job.contract.leases import TOKEN_VARIABLE
from ray_job.contract.prompt_rules import PromptRules
from service.prompts import PromptCounter
from tests.memory_coordinator import PROMPT_RULES_KEY, TOKEN
from tests.ray.job_harness import BATCH_ID, CHAT, ENGINE_ARGS, WAIT_S, MakeJob, chat, descendants

pytestmark = pytest.mark.ray

# Few rows at a time: the engine still has most of them to answer when the first part is committed.
SLOW = {**ENGINE_ARGS, "max_num_seqs": 16}


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
    counter = PromptCounter(PromptRules.from_json((job.coordinator.root / PROMPT_RULES_KEY).read_bytes()))
    counts = [counter.count(CHAT, body) for body in bodies[:20]]
    tokens = [row.body["usage"]["prompt_tokens"] for row in rows[:20]]
    assert [count and count.tokens for count in counts] == tokens
    assert sum(rows.usage.input_tokens for _, part in job.coordinator.commits for rows in part.segments) == sum(tokens)
    ended = job.coordinator.ended
    assert ended is not None
    assert 0 < ended.busy_s <= ended.engine_s < 60
    assert all(part.times[0].sent_s > part.times[0].ready_s for _, part in job.coordinator.commits)
    assert all(set(row.body["error"]) == {"message", "type", "param", "code"} for row in rows[-2:])


def test_batches_share_an_engine_and_a_warm_one_answers_the_next_batch(make_joining_job: MakeJob) -> None:
    job = make_joining_job([chat(f"Question {n}") for n in range(40)], keep_warm_s=600)
    job.add_batch([chat(f"Other {n}") for n in range(40)], batch_id="batch_other", segment_rows=8, cache_salt="other")
    with job.running() as process:
        job.wait_for_rows(process, 0)
        engine = descendants(process, "VLLM::EngineCore")
        started_s = time.monotonic()
        job.add_batch([chat(f"Late {n}") for n in range(10)], batch_id="batch_late")
        job.wait_for_rows(process, 0)
        assert time.monotonic() - started_s < 10
        assert descendants(process, "VLLM::EngineCore") == engine
        job.server.change(drain=True)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert [len(job.rows(each)) for each in (BATCH_ID, "batch_other", "batch_late")] == [40, 40, 10]
    assert len(job.parts("batch_late")) == 1
    assert job.coordinator.ended is not None


def test_draining_job_finishes_what_it_holds_and_takes_nothing_else(make_joining_job: MakeJob) -> None:
    bodies = [chat(f"Question {n}", max_tokens=32) for n in range(64)]
    job = make_joining_job(bodies, keep_warm_s=600, batch_size=16, engine_args=SLOW)
    with job.running() as process:
        job.wait_for_rows(process, 63)
        job.server.change(drain=True)
        job.add_batch([chat("Later")], batch_id="batch_later")
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert (len(job.rows()), len(job.rows("batch_later"))) == (64, 0)


def test_job_ends_when_it_had_no_work_for_a_while(make_joining_job: MakeJob) -> None:
    job = make_joining_job([chat("Hello")], keep_warm_s=3)
    with job.running() as process:
        job.wait_for_rows(process, 0)
        started_s = time.monotonic()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert 2 < time.monotonic() - started_s < 15


def test_committed_rows_of_a_lease_do_not_run_again(make_joining_job: MakeJob) -> None:
    job = make_joining_job([chat(f"Question {n}") for n in range(12)])
    job.coordinator.segments[0].done = {1, 2, 4, 6}
    exit_code, output = job.run()
    assert exit_code == 0, output
    assert [row.line for row in job.rows()] == [1, 4, 6, 8, 9, 10, 11, 12]


def test_equal_lines_have_one_answer(make_joining_job: MakeJob) -> None:
    job = make_joining_job([])
    job.add_batch([chat(f"Question {n}") for n in range(3)], twins={1: (4, 5), 3: (6,)})
    exit_code, output = job.run()
    assert exit_code == 0, output
    rows = job.rows()
    assert [row.custom_id for row in rows] == [f"request-{n}" for n in range(1, 7)]
    assert [row.body["id"] for row in rows[3:]] == [rows[0].body["id"], rows[0].body["id"], rows[2].body["id"]]


def test_rows_are_answered_while_the_coordinator_is_unreachable(make_joining_job: MakeJob) -> None:
    bodies = [chat(f"Question {n}", max_tokens=32) for n in range(100)]
    job = make_joining_job(bodies, batch_size=16, engine_args=SLOW)
    with job.running() as process:
        job.wait_for_rows(process, 99)
        job.server.status = 503
        time.sleep(10)
        job.server.status = 0
        recorded_s = time.monotonic()
        output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, output
    assert [row.line for row in job.rows()] == list(range(1, 101))
    assert output.count("does not answer") == 1
    assert output.count("answers again") == 1
    # It held finished parts for all rows by then.
    assert job.coordinator.commits[-1][0] - recorded_s < 15


def test_job_with_a_void_token_stops_its_engines_and_succeeds(make_joining_job: MakeJob) -> None:
    bodies = [chat(f"Question {n}", max_tokens=64) for n in range(300)]
    job = make_joining_job(bodies, batch_size=16, engine_args=SLOW)
    with job.running() as process:
        job.wait_for_rows(process, 299)
        engines = psutil.Process(process.pid).children(recursive=True)
        job.server.status = 401
        output, _ = process.communicate(timeout=60)
        _, alive = psutil.wait_procs(engines, timeout=30)
    assert process.returncode == 0, output
    assert output.splitlines()[-1].endswith("its token is void")
    assert [each.name() for each in alive] == []


def test_rows_of_lost_segments_are_dropped_and_run_under_their_next_lease(make_joining_job: MakeJob) -> None:
    bodies = [chat(f"Question {n}", max_tokens=32) for n in range(96)]
    job = make_joining_job([], batch_size=8, engine_args=SLOW)
    job.add_batch(bodies, segment_rows=32)
    with job.running() as process:
        job.wait_for_rows(process, 95)
        lost = job.coordinator.lose()
        job.server.change()
        output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, output
    assert lost
    assert [(row.line, row.status) for row in job.rows()] == [(n, 200) for n in range(1, 97)]
    assert {each.epoch for each in job.coordinator.segments} >= {2}
    assert f"{len(lost)} segments were lost" in output or job.coordinator.refused


def test_unreadable_segment_is_given_back_and_others_are_answered(make_joining_job: MakeJob) -> None:
    job = make_joining_job([chat(f"Question {n}") for n in range(4)])
    job.add_batch([chat("Hello")], batch_id="batch_damaged")
    plan = job.coordinator.root / "batches/batch_damaged/plan"
    plan.write_bytes(plan.read_bytes().replace(b"Hello", b"SECR\n"))
    job.add_batch([{"SECRET": 1}], batch_id="batch_wrong")
    plan = job.coordinator.root / "batches/batch_wrong/plan"
    plan.write_bytes(plan.read_bytes().replace(b'"custom_id"', b'"custom_jd"'))
    exit_code, output = job.run()
    assert exit_code == 0, output
    assert [row.line for row in job.rows()] == [1, 2, 3, 4]
    _, damaged, wrong = job.coordinator.segments
    assert len(wrong.failures) == 4
    assert wrong.failures[0].startswith("line 1 of the input is not a request")
    assert "SECRET" not in output + json.dumps(damaged.failures + wrong.failures)


def test_killed_engine_among_two_costs_no_row(make_job: MakeJob) -> None:
    lines = 300  # more than ROWS_PER_ENGINE
    bodies = [chat(f"Question {n}", max_tokens=32) for n in range(lines)]
    job = make_job(bodies, batch_size=16, concurrency=2, engine_args=SLOW)
    with job.running() as process:
        engine = _wait_for_descendant(process, "VLLM::EngineCore")
        job.wait_for_rows(process, lines - 1)
        engine.kill()
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert [(row.line, row.status) for row in job.rows()] == [(n, 200) for n in range(1, lines + 1)]


def test_killed_actor_costs_no_row(make_job: MakeJob) -> None:
    bodies = [chat(f"Question {n}", max_tokens=32) for n in range(100)]
    job = make_job(bodies, batch_size=16, engine_args=SLOW)
    with job.running() as process:
        job.wait_for_rows(process, 99)
        (actor,) = descendants(process, "ray::DirectEngine")
        actor.kill()
        output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, output
    assert "an engine worker ended" in output
    assert job.coordinator.ended is not None
    assert sum(each.engine_restarts for each in (*job.coordinator.syncs, job.coordinator.ended)) == 1
    assert [(row.line, row.status) for row in job.rows()] == [(n, 200) for n in range(1, 101)]


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
        # The driver has checked its own copy of the model by then, and no engine has.
        while not job.server.requests:
            time.sleep(0.001)
        (source / "no-model.txt").write_text("upload the model's directory")
        output, _ = process.communicate(timeout=600)
    assert process.returncode == EXIT_NO_MODEL, output
    assert output.splitlines()[-1].endswith("upload the model's directory")


def test_engine_runs_at_the_niceness_of_its_job_and_without_its_token(make_job: MakeJob) -> None:
    job = make_job([chat("Hello")], keep_warm_s=600)
    # What Ray Jobs set: the environment of the driver, which they give to all workers too.
    given = {"runtime_env": {"env_vars": {TOKEN_VARIABLE: TOKEN, "GIVEN": "yes"}}, "metadata": {}}
    job = replace(job, environment={**job.environment, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(given)})
    with job.running() as process:
        engine = _wait_for_descendant(process, "ray_job.engines.engine_server")
        assert engine.nice() == psutil.Process(process.pid).nice()
        assert engine.environ()["GIVEN"] == "yes"
        for worker in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                assert not worker.environ().get(TOKEN_VARIABLE)
        process.terminate()
        process.communicate(timeout=60)


def test_terminated_job_leaves_no_engine_behind(make_job: MakeJob) -> None:
    job = make_job([chat(f"Question {n}", max_tokens=64) for n in range(200)], batch_size=16)
    with job.running() as process:
        job.wait_for_rows(process, 199)
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.communicate(timeout=60)
        _, alive = psutil.wait_procs(family, timeout=30)
        assert [p.name() for p in alive] == []


def _wait_for_descendant(job: subprocess.Popen[str], name: str) -> psutil.Process:
    """Wait until a running job has a process with this name in its command line."""
    deadline = time.monotonic() + WAIT_S
    while job.poll() is None and time.monotonic() < deadline:
        for process in descendants(job, name):
            return process
        time.sleep(0.1)
    raise AssertionError(f"no process {name} {'in time' if job.poll() is None else 'before the job ended'}")
