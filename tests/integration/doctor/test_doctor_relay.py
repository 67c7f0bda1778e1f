"""`cloister doctor` in the pods of a stack, by kubectl."""

import json
import os
import shutil
from pathlib import Path

import pytest

from service.cli.doctor.relay import relayed
from tests.integration.doctor.told import Doctor

ARGUMENTS = ("--only", "pod", "--context", "factory", "--namespace", "cloister-acme-prod")
OK = json.dumps({"from": "in a pod of the stack", "check": "database", "result": "ok", "message": "there"}) + "\n"
DONE = json.dumps({"done": True, "ok": 1, "failed": 0, "not_checked": 0}) + "\n"


KUBECTL = """#!/bin/sh
echo "$@" >>"{directory}/calls"
cat "{directory}/answer"
cat "{directory}/error" >&2
exit "$(cat "{directory}/code")"
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a kubectl that notes how it is called, and answers and ends as files say."""
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL.format(directory=tmp_path))
    program.chmod(0o755)
    for name in ("answer", "error"):
        (tmp_path / name).touch()
    (tmp_path / "code").write_text("0")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_in_the_pods_the_doctor_is_run_by_kubectl(doctor: Doctor, kubectl: Path) -> None:
    record = {"from": "in a pod of the stack", "check": "database", "result": "failed", "message": "gone"}
    (kubectl / "answer").write_text(json.dumps(record) + "\n" + DONE)
    (kubectl / "code").write_text("1")
    told = doctor(*ARGUMENTS)
    assert [(each["from"], each["message"]) for each in told.records] == [
        ("in a pod of reconciler", "gone"), ("in a pod of api", "gone")
    ]  # fmt: skip
    assert (kubectl / "calls").read_text().splitlines() == [
        f"--context factory --namespace cloister-acme-prod exec deploy/{name} --container {name} -- "
        "cloister doctor --only pod --json"
        for name in ("reconciler", "api")
    ]


def test_a_pod_that_kubectl_cannot_enter_is_told_with_its_reason(doctor: Doctor, kubectl: Path) -> None:
    (kubectl / "error").write_text("error: unable to upgrade connection: Forbidden")
    told = doctor(*ARGUMENTS)
    assert "unable to upgrade connection: Forbidden" in told["doctor in the pod"]


def test_without_kubectl_the_command_is_told(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    told = doctor(*ARGUMENTS)
    assert "kubectl --context factory --namespace cloister-acme-prod exec deploy/api" in told["stack"]


@pytest.mark.parametrize(
    ("answer", "code", "reason"),
    [
        (OK, 137, "command terminated with exit code 137"),
        (OK, 1, "Traceback (most recent call last)"),
        (OK, 0, "the connection was cut"),
        (OK + DONE, 255, "error: lost connection to pod"),
        (OK + OK[:40], 1, "cut off"),
        (OK + '{"level": "info"}\n' + '{"check": "a", "result": "odd", "message": ""}\n', 1, "lines of somebody else"),
    ],
)
def test_a_doctor_that_does_not_get_to_its_end_is_told(
    doctor: Doctor, kubectl: Path, answer: str, code: int, reason: str
) -> None:
    (kubectl / "answer").write_text(answer)
    (kubectl / "error").write_text(reason)
    (kubectl / "code").write_text(str(code))
    told = doctor(*ARGUMENTS)
    assert told.code == 1
    assert told.results == {"database": "ok", "doctor in the pod": "failed"}
    assert f"ended early, with {code}: {reason}" in told["doctor in the pod"]


def test_a_doctor_that_got_to_its_end_is_right(doctor: Doctor, kubectl: Path) -> None:
    (kubectl / "answer").write_text(OK + DONE)
    told = doctor(*ARGUMENTS)
    assert (told.code, told.results) == (0, {"database": "ok"})


def test_a_stack_that_is_not_there_is_no_failure(doctor: Doctor, kubectl: Path) -> None:
    (kubectl / "error").write_text('Error from server (NotFound): namespaces "cloister-acme-prod" not found')
    (kubectl / "code").write_text("1")
    assert doctor(*ARGUMENTS).results == {"stack": "not_checked"}


def test_a_pod_that_never_answers_is_given_up() -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    (found,) = relayed([sleep, "60"], limit_s=0.2)
    assert "ended early, with -9" in found.message


def test_a_kubectl_that_cannot_be_run_is_told(tmp_path: Path) -> None:
    program = tmp_path / "kubectl"
    program.write_text("no program")
    program.chmod(0o755)
    (found,) = relayed([str(program)])
    assert found.message == f"cannot run {program}: Exec format error"
