"""Runs the doctor in the pods of a stack by kubectl, from the machine of an operator."""

import json
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from service.cli.doctor.findings import Finding, Result, failed, not_checked

DEPLOYMENTS: Final = ("reconciler", "api")
"""Policies and rights differ between the two."""
_MAX_REASON: Final = 500


def kubectl_exec(*, kubeconfig: Path | None, context: str, namespace: str, deployment: str) -> list[str]:
    """The command that runs the doctor in a pod of a Deployment."""
    return [
        "kubectl",
        *(["--kubeconfig", str(kubeconfig)] if kubeconfig else []),
        *(["--context", context] if context else []),
        *["--namespace", namespace, "exec", f"deploy/{deployment}", "--container", deployment, "--"],
        *["cloister", "doctor", "--only", "pod", "--json"],
    ]


def relayed(command: Sequence[str]) -> Iterator[Finding]:
    """What the doctor in the pod finds, as it finds it."""
    count = 0
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        for line in process.stdout or ():
            if line.startswith("{"):
                record = json.loads(line)
                count += 1
                yield Finding(record["check"], Result(record["result"]), record["message"])
        process.wait()
        errors.seek(0)
        reason = " ".join(errors.read().split())[-_MAX_REASON:]
    if not count and "(NotFound)" in reason:
        yield not_checked("stack", f"{reason}: `pulumi up` makes it")
    elif not count:
        yield failed("doctor in the pod", f"`{shlex.join(command)}` ended with {process.returncode}: {reason}")
