"""The conformance suite itself: its list of checks, and the faults that it finds."""

import ast
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.contract import AREAS, POINTS

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "conformance"
# The minimum that passes for a model, a file and a batch.
NOTHING = b'{"id": "nothing", "object": "nothing", "data": [], "status": "failed"}'


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.conformance", *arguments]
    return subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)


class _EmptyAnswers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(NOTHING)))
        self.end_headers()
        self.wfile.write(NOTHING)

    do_GET = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815 - the names that the base class looks for

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def empty_server() -> Iterator[str]:
    """Base URL of a server that returns the same JSON object for every request."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _EmptyAnswers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_every_check_cites_a_point_of_the_contract() -> None:
    listed = [line.split("\t") for line in run("--list", "--extensions").stdout.splitlines()]
    assert len(listed) > 400
    assert {area for area, _, _ in listed} == set(AREAS.values())
    assert {point for _, point, _ in listed} == set(POINTS)


def test_extensions_are_not_checked_by_default() -> None:
    assert AREAS["test_extensions"] not in run("--list").stdout


def test_suite_imports_no_code_of_cloister() -> None:
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            assert not {"service", "ray_job", "infra"} & {name.split(".")[0] for name in names}


def test_report_shows_expected_and_seen_values_of_a_failing_server(empty_server: str, tmp_path: Path) -> None:
    done = run(
        f"--base-url={empty_server}", "--api-key=x", "--model=nothing", "--timeout=5", "-k=test_models",
        f"--json={tmp_path / 'report.json'}", f"--markdown={tmp_path / 'report.md'}",
    )  # fmt: skip
    assert done.returncode == 1
    assert "✗  M1   models are a list object" in done.stdout
    assert "expected: ('list', <class 'list'>)" in done.stdout
    assert "seen:     ('nothing', <class 'list'>)" in done.stdout
    checks = json.loads((tmp_path / "report.json").read_text())["checks"]
    assert {check["outcome"] for check in checks} == {"does not hold"}
    assert "### models" in (tmp_path / "report.md").read_text()


def test_missing_server_is_reported_in_one_line() -> None:
    done = run("--base-url=http://127.0.0.1:9/v1", "--api-key=x", "--model=x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("conformance: http://127.0.0.1:9/v1 does not answer")
