"""The command line without a server: validation, the choice of the server, and docs/cli.md."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from service.cli.app import main
from service.client.connection import find_server
from service.client.exit_codes import EPILOG, MEANINGS, CommandError
from service.client.terminal import duration
from service.local.client_env import Client, write_client_env
from tests.integration.cli_reference import PAGE, START, updated
from tests.integration.reconciler_harness import CHAT, line

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cloister(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process, in an empty directory, without a server."""
    for name in ("CLOISTER_BASE_URL", "CLOISTER_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def test_validate_prints_requests_endpoint_and_model_of_a_valid_file(cloister: Command) -> None:
    Path("good.jsonl").write_bytes(line(1) + b"\n" + line(2))
    expected = f"good.jsonl: 2 requests for {CHAT}, model demo, no errors\n"
    assert cloister("validate", "good.jsonl") == (0, expected, "")


def test_validate_prints_one_line_for_each_error(cloister: Command) -> None:
    Path("bad.jsonl").write_bytes(line(1) + b"\n\n{\n" + line(1))
    code, out, err = cloister("validate", "bad.jsonl")
    assert (code, err) == (7, "")
    rows = [row.split("\t") for row in out.splitlines()]
    assert rows[0] == ["line", "code", "param", "message"]
    assert [row[:3] for row in rows[1:3]] == [["3", "invalid_json_line", ""], ["4", "duplicate_custom_id", "custom_id"]]
    assert rows[3] == [f"bad.jsonl: 2 errors in 3 requests for {CHAT}"]


def test_validate_prints_json_only(cloister: Command) -> None:
    Path("bad.jsonl").write_bytes(b"x\n" * 1_200)
    code, out, err = cloister("validate", "bad.jsonl", "--json")
    result = json.loads(out)
    assert (code, err, result["is_valid"], result["error_count"], len(result["errors"])) == (7, "", False, 1_200, 1_000)
    assert result["errors"][0] | {"message": ""} == {
        "code": "invalid_json_line",
        "message": "",
        "param": None,
        "line": 1,
    }


def test_validate_checks_models_against_a_catalogue(cloister: Command) -> None:
    Path("models.yaml").write_text("models:\n  - id: other\n    source: /models/other\n")
    Path("good.jsonl").write_bytes(line(1))
    code, out, _ = cloister("validate", "good.jsonl", "--models", "models.yaml")
    assert code == 7
    assert "model_not_found" in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["validate", "missing.jsonl"], 1, "error: cannot read missing.jsonl: No such file or directory"),
        (["validate", "."], 1, "is a directory"),
        (["validate", "/dev/null"], 1, "is not a regular file"),
        (["validate", "good.jsonl", "--models", "missing.yaml"], 1, "cannot read the model catalogue missing.yaml"),
        (["validate", "good.jsonl", "--endpoint", "/v1/none"], 2, "--endpoint"),
        (["submit", "good.jsonl", "--output", "x"], 2, "give --wait too"),
        (["submit", "good.jsonl", "--metadata", "x"], 2, "must look like KEY=VALUE"),
        (["submit", "good.jsonl", *(f"--metadata={number}=x" for number in range(17))], 2, "at most 16"),
        (["results", "batch_x", "--json"], 2, "give --output PATH"),
        (["status"], 1, "no server is named: set CLOISTER_BASE_URL"),
    ],
)
def test_wrong_usage_is_reported_with_advice(cloister: Command, arguments: list[str], code: int, message: str) -> None:
    Path("good.jsonl").write_bytes(line(1))
    ended, out, err = cloister(*arguments)
    assert (ended, out) == (code, "")
    assert message in re.sub(r"[│\s]+", " ", err)


def test_unreachable_server_has_its_exit_code(cloister: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOISTER_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("CLOISTER_API_KEY", "sk-x")
    code, out, err = cloister("status")
    assert (code, out) == (8, "")
    assert err.startswith("error: cannot reach http://127.0.0.1:9/v1 (CLOISTER_BASE_URL, CLOISTER_API_KEY)")


def test_environment_takes_precedence_over_the_data_directory(tmp_path: Path) -> None:
    write_client_env(tmp_path / "client.env", Client(base_url="http://127.0.0.1:1/v1", api_key="local"))
    openai = {"OPENAI_BASE_URL": "https://o:2/v1", "OPENAI_API_KEY": "o"}
    ours = {"CLOISTER_BASE_URL": "https://c:3/", "CLOISTER_API_KEY": "c"}
    found = [find_server(environment, tmp_path) for environment in ({}, openai, openai | ours)]
    assert [(server.base_url, server.api_key) for server in found] == [
        ("http://127.0.0.1:1/v1", "local"),
        ("https://o:2/v1", "o"),
        ("https://c:3/v1", "c"),
    ]


def test_key_without_its_url_is_not_used(tmp_path: Path) -> None:
    write_client_env(tmp_path / "client.env", Client(base_url="http://127.0.0.1:1/v1", api_key="local"))
    assert find_server({"OPENAI_API_KEY": "sk-of-openai"}, tmp_path).api_key == "local"
    for half in ({"CLOISTER_BASE_URL": "http://x"}, {"CLOISTER_API_KEY": "c"}, {"OPENAI_BASE_URL": "http://x"}):
        with pytest.raises(CommandError, match="set both, or neither"):
            find_server(half, tmp_path)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (61, "1 min 1 s"), (3_600, "1 h"), (5_400, "1 h 30 min"), (90_000, "1 d 1 h")]
)
def test_duration_has_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_page_has_the_current_reference() -> None:
    page = PAGE.read_text()
    assert page == updated(page), "run `python -m tests.integration.cli_reference`"


def test_help_lists_every_exit_code() -> None:
    assert [int(code) for code in re.findall(r"\d+", EPILOG)] == [code.value for code in MEANINGS]


def test_options_in_the_page_exist() -> None:
    prose, reference = PAGE.read_text().split(START)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", prose)) <= set(re.findall(r"--[a-z][a-z-]*", reference))
