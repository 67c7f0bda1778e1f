"""The published conformance suite, run against a local stack as a user would run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.local_stack import LocalStack

pytestmark = pytest.mark.ray

BUILD = Path(__file__).parents[2] / "build"


def test_stack_passes_the_suite_with_extensions(stack: LocalStack) -> None:
    stack.cloister("projects", "create", "stranger")
    stranger = stack.cloister("keys", "create", "conformance", "--project=stranger")
    command = [sys.executable, "-m", "tests.conformance", "--model=demo", "--embeddings-model=demo-embed"]
    command += [f"--other-api-key={stranger}", "--extensions", "--large"]
    command += [f"--json={BUILD / 'conformance.json'}", f"--markdown={BUILD / 'conformance.md'}"]
    named = {"OPENAI_BASE_URL": stack.client.base_url, "OPENAI_API_KEY": stack.client.api_key}
    done = subprocess.run(command, env={**os.environ, **named}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads((BUILD / "conformance.json").read_text())["checks"]
    # Without Node its client cannot be checked. Everything else must be.
    left_out = {check["area"] for check in checks if check["outcome"] == "not checked"}
    assert left_out <= {"official Node client"}
    assert len(checks) > 450
