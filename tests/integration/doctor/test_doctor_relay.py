"""Findings of a doctor in the pods of a stack, relayed by kubectl."""

import json
import os
import shutil
from pathlib import Path

import pytest

from service.doctor.pod import relay
from tests.integration.doctor.doctor_run import Doctor

ARGUMENTS = ("--only", "pod", "--context", "factory", "--namespace", "cloister-acme-prod")
OK = json.dumps({"from": "in a pod of the stack", "check": "database", "result": "ok", "message": "there"}) + "\n"
DONE = json.dumps({"done": True, "ok": 1, "warning": 0, "failed": 0, "not_checked": 0}) + "\n"


KUBECTL = """#!/bin/sh
echo "$@" >>"{directory}/calls"
cat "{directory}/answer"
cat "{directory}/error" >&2
exit "$(cat "{directory}/code")"
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a kubectl on PATH that records its calls; files in this directory hold its output and exit code."""
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL.format(directory=tmp_path))
    program.chmod(0o755)
    for name in ("answer", "error"):
        (tmp_path / name).touch()
    (tmp_path / "code").write_text("0")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_kubectl_runs_the_doctor_in_each_deployment(doctor: Doctor, kubectl: Path) -> None:
    record = {"from": "in a pod of the stack", "check": "database", "result": "failed", "message": "gone"}
    (kubectl / "answer").write_text(json.dumps(record) + "\n" + DONE)
    (kubectl / "code").write_text("1")
    run = doctor(*ARGUMENTS)
    assert [(each["from"], each["message"]) for each in run.records] == [
        ("in a pod of reconciler", "gone"), ("in a pod of api", "gone")
    ]  # fmt: skip
    assert (kubectl / "calls").read_text().splitlines() == [
        f"--context factory --namespace cloister-acme-prod exec deploy/{name} --container {name} -- "
        "cloister doctor --only pod --json"
        for name in ("reconciler", "api")
    ]


def test_kubectl_error_is_reported(doctor: Doctor, kubectl: Path) -> None:
    (kubectl / "error").write_text("error: unable to upgrade connection: Forbidden")
    run = doctor(*ARGUMENTS)
    assert "unable to upgrade connection: Forbidden" in run["doctor in the pod"]


def test_command_is_shown_if_kubectl_is_missing(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    run = doctor(*ARGUMENTS)
    assert "kubectl --context factory --namespace cloister-acme-prod exec deploy/api" in run["stack"]


@pytest.mark.parametrize(
    ("answer", "code", "reason"),
    [
        (OK, 137, "command terminated with exit code 137"),
        (OK, 1, "Traceback (most recent call last)"),
        (OK, 0, "the connection was cut"),
        (OK + DONE, 255, "error: lost connection to pod"),
        (OK + OK[:40], 1, "cut off"),
        (
            OK + '{"level": "info"}\n' + '{"check": "a", "result": "odd", "message": ""}\n',
            1,
            "lines of another program",
        ),
    ],
)
def test_incomplete_report_is_a_failure(doctor: Doctor, kubectl: Path, answer: str, code: int, reason: str) -> None:
    (kubectl / "answer").write_text(answer)
    (kubectl / "error").write_text(reason)
    (kubectl / "code").write_text(str(code))
    run = doctor(*ARGUMENTS)
    assert run.code == 1
    assert run.results == {"database": "ok", "doctor in the pod": "failed"}
    assert f"ended early, with {code}: {reason}" in run["doctor in the pod"]


def test_complete_report_has_no_finding_of_the_relay(doctor: Doctor, kubectl: Path) -> None:
    (kubectl / "answer").write_text(OK + DONE)
    run = doctor(*ARGUMENTS)
    assert (run.code, run.results) == (0, {"database": "ok"})


def test_missing_stack_is_not_checked(doctor: Doctor, kubectl: Path) -> None:
    (kubectl / "error").write_text('Error from server (NotFound): namespaces "cloister-acme-prod" not found')
    (kubectl / "code").write_text("1")
    assert doctor(*ARGUMENTS).results == {"stack": "not_checked"}


def test_silent_pod_times_out() -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    (found,) = relay([sleep, "60"], timeout_s=0.2)
    assert "ended early, with -9" in found.message


def test_kubectl_that_cannot_run_is_reported(tmp_path: Path) -> None:
    program = tmp_path / "kubectl"
    program.write_text("no program")
    program.chmod(0o755)
    (found,) = relay([str(program)])
    assert found.message == f"cannot run {program}: Exec format error"
