"""Estimates on real Postgres: what one batch's job reports is known when the next batch is validated."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from tokenizers import Tokenizer, models, pre_tokenizers

from ray_job.contract.object_keys import job_prompt_rules_key
from ray_job.contract.prompt_rules import ChatRules, PromptRules
from service.api_keys import create_api_key
from service.cli.app import main
from service.client.exit_codes import ExitCode
from service.estimates import KEPT_MEASUREMENTS
from tests.integration.reconciler_harness import BATCH, CHAT, Stack
from tests.integration.recorded_work import accept, add_job, add_part, end
from tests.integration.test_cli_batches import serving


def line(number: int, words: int = 9) -> bytes:
    body = {"model": "demo", "messages": [{"role": "user", "content": "word " * words}], "max_tokens": 4}
    return json.dumps({"custom_id": f"id-{number}", "method": "POST", "url": CHAT, "body": body}).encode()


@pytest.fixture(scope="module")
def rules() -> bytes:
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    chat = ChatRules(template="BEGIN {{ messages[0].content }}", content_format="string")
    return PromptRules(max_prompt_tokens=50, max_model_len=64, tokenizer=words.to_str(), chat=chat).to_json()


def run(stack: Stack, batch_id: str, *lines: bytes, rules: bytes | None = None) -> dict[str, Any]:
    """Run a batch for 100 s on an engine of its own job, which reports these prompt rules, and return its row."""
    accept(stack, *lines, batch_id=batch_id)
    if stack.batch(batch_id)["status"] == "failed":
        return stack.batch(batch_id)
    job_id = f"job-{batch_id}"
    add_job(stack, job_id, launched_s_ago=150, engines=1)
    add_part(stack, *range(1, len(lines) + 1), job_id=job_id, batch_id=batch_id, work_s=100)
    if rules is not None:
        stack.store.put(job_prompt_rules_key(job_id), [rules])
    return end(stack, batch_id)


def test_the_second_batch_of_a_model_has_an_estimate(stack: Stack, rules: bytes) -> None:
    first = run(stack, BATCH, line(1), line(2), rules=rules)
    assert first["status"] == "completed"
    assert first["estimate"] == {
        "input_tokens": None,
        "output_tokens": None,
        "most_output": None,
        "duration_s": None,
        "gpu_seconds": None,
        "sampled_lines": 0,
    }
    second = run(stack, "batch_2", line(1), line(2))
    estimate = second["estimate"]
    assert (estimate["input_tokens"], estimate["sampled_lines"]) == (20, 2) == (second["input_tokens"], 2)
    assert estimate["duration_s"] == pytest.approx(112, abs=5)
    assert (estimate["output_tokens"], estimate["most_output"]) == (4, 8)
    third = run(stack, "batch_3", line(1), line(2), rules=rules)
    assert third["estimate"]["gpu_seconds"] == 0
    (row, *_) = stack.sql("SELECT * FROM measurements ORDER BY id")
    assert (row["rows"], row["input_tokens"], row["engine_s"], row["output_share"]) == (2, 20, 100, 0.5)


def test_output_is_expected_as_it_was_measured(stack: Stack, rules: bytes) -> None:
    run(stack, "batch_1", line(1), line(2), rules=rules)
    estimate = run(stack, "batch_2", *map(line, range(4)))["estimate"]
    # The first one generated 2 tokens for each line, which may have 4.
    assert (estimate["output_tokens"], estimate["most_output"]) == (8, 16)


def test_the_client_and_the_api_show_the_same_estimate(
    stack: Stack, rules: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(stack, "batch_0", line(1), line(2), rules=rules)
    accept(stack, *map(line, range(3)))
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\n".join(map(line, range(3))))
    capsys.readouterr()

    def validate(*options: str) -> str:
        with pytest.raises(SystemExit):
            main(["validate", str(file), *options])
        return capsys.readouterr().out

    with serving(stack) as base_url:
        key = create_api_key(stack.pool, project_id="p", name="test")
        monkeypatch.setenv("CLOISTER_BASE_URL", base_url)
        monkeypatch.setenv("CLOISTER_API_KEY", key)
        headers = {"authorization": f"Bearer {key}"}
        shown = httpx.get(f"{base_url}/v1/batches/{BATCH}", headers=headers).json()["x_cloister"]["estimate"]
        assert shown["input_tokens"] == 30
        assert json.loads(validate("--estimate", "--json"))["estimate"] == shown
        text = f"30 input tokens (exact), 6 output tokens, {shown['duration_s']:.0f} s, 0 GPU seconds"
        assert text in validate("--estimate")
        assert httpx.get(f"{base_url}/v1/estimates/other", headers=headers).status_code == 404
        file.write_bytes(line(1, words=50))
        assert "token_limit_exceeded" in validate("--estimate", "--json")
    monkeypatch.delenv("CLOISTER_BASE_URL")
    monkeypatch.delenv("CLOISTER_API_KEY")
    with pytest.raises(SystemExit) as ended:
        main(["validate", str(file), "--estimate", "--data-dir", str(tmp_path)])
    assert ended.value.code == ExitCode.ERROR
    assert "no server is named" in capsys.readouterr().err


def test_a_line_that_is_too_long_fails_the_batch_before_a_job_starts(stack: Stack, rules: bytes) -> None:
    run(stack, "batch_0", line(1), rules=rules)
    batch = run(stack, BATCH, line(1), line(2, words=50))
    assert (batch["status"], batch["attempt"]) == ("failed", 0)
    assert [(error["code"], error["line"]) for error in stack.errors()] == [("token_limit_exceeded", 2)]


def test_reports_that_are_not_valid_change_nothing(stack: Stack, rules: bytes) -> None:
    wrong = rules.replace(b"BEGIN {{", b"BEGIN {%")
    assert run(stack, "batch_1", line(1), rules=wrong)["status"] == "completed"
    assert run(stack, "batch_2", line(1))["estimate"]["input_tokens"] is None


def test_a_count_that_differs_from_the_engines_is_logged(stack: Stack, rules: bytes) -> None:
    run(stack, "batch_1", line(1), rules=rules)
    with structlog.testing.capture_logs() as logs:
        run(stack, "batch_2", line(1))
        run(stack, "batch_3", line(1, words=5))
    (found,) = (entry for entry in logs if entry["event"] == "estimate.inexact")
    assert (found["batch_id"], found["counted"], found["engine_counted"]) == ("batch_3", 6, 10)


def test_old_measurements_are_dropped(stack: Stack, rules: bytes) -> None:
    run(stack, "batch_1", line(1), rules=rules)
    stack.sql(
        "INSERT INTO measurements (model_key, measured_at, rows, input_tokens, output_tokens, engines, engine_s,"
        " busy_s, other_s, job_other_s) SELECT model_key, now(), 1, 1, 1, 1, 1, 1, 1, 1"
        " FROM measurements, generate_series(1, 30)"
    )
    run(stack, "batch_2", line(1), rules=rules)
    assert len(stack.sql("SELECT id FROM measurements")) == KEPT_MEASUREMENTS + 1
