"""Runs the doctor in the pods of a stack by kubectl, from the machine of an operator."""

import json
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from service.cli.doctor.findings import Finding, Result, failed, not_checked

DEPLOYMENTS: Final = ("reconciler", "api")
"""Policies and rights differ between the two."""
_CHECK: Final = "doctor in the pod"
_MAX_REASON: Final = 500
_LIMIT_S: Final = 600.0
_ENDS: Final = (0, 1)


def kubectl_exec(*, kubeconfig: Path | None, context: str, namespace: str, deployment: str) -> list[str]:
    """The command that runs the doctor in a pod of a Deployment."""
    return [
        "kubectl",
        *(["--kubeconfig", str(kubeconfig)] if kubeconfig else []),
        *(["--context", context] if context else []),
        *["--namespace", namespace, "exec", f"deploy/{deployment}", "--container", deployment, "--"],
        *["cloister", "doctor", "--only", "pod", "--json"],
    ]


def relayed(command: Sequence[str], *, limit_s: float = _LIMIT_S) -> Iterator[Finding]:
    """What the doctor in the pod finds, as it finds it; and a failure where it did not get to its end.

    Args:
        command: runs it.
        limit_s: how long it may take, in seconds.
    """
    count, is_done = 0, False
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
            )
        except OSError as error:
            yield failed(_CHECK, f"cannot run {command[0]}: {error.strerror}")
            return
        timer = threading.Timer(limit_s, process.kill)
        timer.daemon = True  # who presses Ctrl-C does not wait for it
        timer.start()
        try:
            with process:
                for line in process.stdout or ():
                    record = _record(line)
                    is_done = is_done or "done" in record
                    if finding := _finding(record):
                        count += 1
                        yield finding
        finally:
            timer.cancel()
        errors.seek(0)
        reason = " ".join(errors.read().split())[-_MAX_REASON:]
    if not count and "(NotFound)" in reason:
        yield not_checked("stack", f"{reason}: `pulumi up` makes it")
    elif not (is_done and process.returncode in _ENDS):
        yield failed(
            _CHECK,
            f"`{shlex.join(command)}` ended early, with {process.returncode}: {reason or 'no reason given'}. What it "
            f"did not tell was not checked (137: no memory was left for it; -9: it took longer than {limit_s:.0f} s)",
        )


def _record(line: str) -> dict[str, Any]:
    """A line of the doctor's; empty for what is none, such as one that was cut off."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _finding(record: dict[str, Any]) -> Finding | None:
    try:
        return Finding(record["check"], Result(record["result"]), record["message"])
    except (KeyError, ValueError):
        return None
