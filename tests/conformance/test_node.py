"""Checks with the official Node client; skipped without Node and npm."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests.conformance.target import Target
from tests.conformance.workload import NO_FILE

pytestmark = [pytest.mark.point("J1"), pytest.mark.late]

CHECKS: Final = (
    "it uploads a buffer",
    "it uploads a stream",
    "it reads content",
    "it pages through files",
    "it pages through batches",
    "it deletes a file",
    "it creates a batch and waits for its end",
    "it reads an output file",
    "it cancels a cancelled batch",
    "it raises ConflictError and does not retry",
    "it raises NotFoundError",
    "it raises BadRequestError",
    "it raises AuthenticationError",
    "it makes one batch if the first response is lost",
)
SOURCE: Final = Path(__file__).parent / "node"
BUILD: Final = Path(__file__).parents[2] / "build" / "conformance_node"
INSTALL: Final = ("install", "--no-package-lock", "--no-save", "--ignore-scripts", "--no-audit", "--no-fund")
OLDEST_NODE: Final = 20
TIMEOUT_S: Final = 300


@pytest.fixture(scope="module")
def program() -> list[str]:
    """Command that runs the Node checks; skips with the reason if it cannot run."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node or npm is not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").split(".")[0]) < OLDEST_NODE:
        pytest.skip(f"node is {version}; the client needs {OLDEST_NODE} or newer")
    BUILD.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "pass.mjs"):
        shutil.copy(SOURCE / name, BUILD / name)
    done = subprocess.run([npm, *INSTALL], cwd=BUILD, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install the client: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    return [node, str(BUILD / "pass.mjs")]


@pytest.fixture(scope="module")
def results(
    program: list[str], target: Target, main: dict[str, Any], failed: dict[str, Any], cancelled: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Results that the Node program printed, by the name of the check."""
    arguments = [target.base_url, main["output_file_id"], failed["id"], cancelled["id"], NO_FILE]
    done = subprocess.run(
        [*program, *arguments],
        env={**os.environ, "OPENAI_API_KEY": target.api_key},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    return {result["name"]: result for result in printed}


@pytest.mark.parametrize("name", CHECKS)
def test_with_the_node_client(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["seen"] == results[name]["expected"]
