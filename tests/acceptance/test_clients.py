"""The programs of docs/clients.md, with the libraries that they use, against ``cloister local``."""

import json
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from tests.acceptance.local_stack import LocalStack

pytestmark = pytest.mark.ray

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "clients.md").read_text()
# It has other versions of some of cloister's own packages.
PYTHON = REPOSITORY / "build" / "clients" / "bin" / "python"
TIMEOUT_S = 400


def run(name: str, stack: LocalStack, directory: Path) -> list[str]:
    """Run a program of the page with the variables of the page, and return the lines that it prints.

    A request to any server but the stack would go to a proxy, which must get none.
    """
    assert PYTHON.exists(), "the clients are not installed; run make clients"
    (program,) = re.findall(rf"^```python {name}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    section = PAGE[: PAGE.index(program)].rpartition("\n## ")[2]
    variables = dict(re.findall(r"^    export ([A-Z_]+)=(\w+)", section, re.MULTILINE))
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        environment = {
            **variables,
            "PATH": os.environ["PATH"],
            "HOME": str(directory),
            "OPENAI_BASE_URL": stack.client.base_url,
            "OPENAI_API_KEY": stack.client.api_key,
            "ALL_PROXY": f"http://127.0.0.1:{proxy.getsockname()[1]}",
            "NO_PROXY": "127.0.0.1",
        }
        ended = subprocess.run(
            [PYTHON, "-c", program],
            env=environment,
            cwd=directory,
            capture_output=True,
            check=False,
            text=True,
            timeout=TIMEOUT_S,
        )
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_litellm(stack: LocalStack, tmp_path: Path) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    lines = [
        {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(3)
    ]
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
    printed = [json.loads(line) for line in run("litellm", stack, tmp_path) if line.startswith("{")]
    assert [row["custom_id"] for row in printed] == ["id-0", "id-1", "id-2"]
    assert all(row["response"]["body"]["choices"][0]["message"]["content"] for row in printed)


def test_instructor_gets_objects_of_its_response_model(stack: LocalStack, tmp_path: Path) -> None:
    printed = run("instructor", stack, tmp_path)
    answers = [line for line in printed if line.startswith("request-")]
    assert [re.sub("(positive|negative)$", "x", line) for line in answers] == ["request-0 x", "request-1 x"]


def test_curator_gets_objects_of_its_response_format(stack: LocalStack, tmp_path: Path) -> None:
    printed = run("curator", stack, tmp_path)
    assert len(printed) == 2
    assert set(printed) <= {"positive", "negative"}
