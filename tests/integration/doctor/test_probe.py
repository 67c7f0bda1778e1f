"""Connections that a pod tries, in a Python of its own as in a pod, and the options that start the pods."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from service.doctor.preflight.temporary_pods import PROBE
from service.local.ray_head import free_ports
from tests.integration.doctor.doctor_run import Doctor


def probe(*targets: tuple[str, int]) -> Any:
    request = json.dumps({"targets": targets, "clock": [["127.0.0.1", 9]]})
    command = [sys.executable, "-", "connect", request]
    return json.loads(subprocess.run(command, input=PROBE, capture_output=True, text=True, check=True).stdout)


def test_each_outcome_is_distinguished() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
        (closed,) = free_ports(1)
        address = silent.getsockname()
        with socket.create_connection(address):
            answer = probe(
                ("127.0.0.1", server.getsockname()[1]), ("127.0.0.1", closed), ("127.0.0.1", address[1]), ("a..b", 80)
            )
    assert [each["found"] for each in answer["results"]] == ["open", "refused", "no answer", "no address"]
    assert answer["skew_s"] is None


def test_pod_accepts_connections() -> None:
    (port,) = free_ports(1)
    process = subprocess.Popen([sys.executable, "-c", PROBE, "serve", str(port)])
    try:
        end = time.monotonic() + 20
        while (found := probe(("127.0.0.1", port))["results"][0]["found"]) != "open" and time.monotonic() < end:
            pass
    finally:
        process.kill()
        process.wait()
    assert found == "open"


@pytest.mark.parametrize("option", [["--gpu-check"], ["--report", "r"], ["--external", "a:1"]])
def test_options_of_temporary_pods_need_a_stack_file(doctor: Doctor, option: list[str]) -> None:
    assert doctor(*option).code == 2


def test_wrong_destination_and_stack_file_are_errors(doctor: Doctor, tmp_path: Path) -> None:
    run = doctor("--stack-file", str(tmp_path / "none.yaml"))
    assert run.code == 2
    assert "Name a stack file" in " ".join(run.err.split())
    assert doctor("--stack-file", str(tmp_path / "none.yaml"), "--external", "a").code == 2
