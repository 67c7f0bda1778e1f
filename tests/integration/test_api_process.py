"""``python -m service.api`` as a process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from service.api_keys import create_api_key
from service.db import Pool
from service.local.ray_head import free_ports
from service.projects import ensure_default_project

pytestmark = pytest.mark.slow

MODELS = "models:\n  - id: demo\n    source: /models/demo\n"


def wait_until_ready(base_url: str) -> None:
    for _ in range(300):
        try:
            if httpx.get(f"{base_url}/readyz").status_code == 200:
                return
        except httpx.ConnectError:
            pass  # it does not listen yet
        time.sleep(0.1)
    pytest.fail("the API was not ready within 30 s")


def test_invalid_settings_end_the_process() -> None:
    environment = {**os.environ, "CLOISTER_PORT": "x"}
    ended = subprocess.run(
        [sys.executable, "-m", "service.api"], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "CLOISTER_PORT" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_process_serves_logs_without_content_and_stops(
    database_url: str, pool: Pool, tmp_path: Path, receipt_key_file: str
) -> None:
    (tmp_path / "models.yaml").write_text(MODELS)
    (port,) = free_ports(1)
    environment = {
        **os.environ,
        "CLOISTER_DATABASE_URL": database_url,
        "CLOISTER_OBJECT_STORE": f"file://{tmp_path}/objects",
        "CLOISTER_MODELS": str(tmp_path / "models.yaml"),
        "CLOISTER_HOST": "::",
        "CLOISTER_PORT": str(port),
        "CLOISTER_RETENTION_DAYS": "7",
        "CLOISTER_RECEIPT_KEY_FILE": receipt_key_file,
    }
    key = create_api_key(pool, project_id=ensure_default_project(pool).id, name="test")
    process = subprocess.Popen([sys.executable, "-m", "service.api"], env=environment, stdout=subprocess.PIPE)
    try:
        wait_until_ready(f"http://127.0.0.1:{port}")
        answer = httpx.post(
            f"http://[::1]:{port}/v1/files",
            headers={"authorization": f"Bearer {key}"},
            data={"purpose": "batch"},
            files={"file": ("a.jsonl", b'{"prompt":"confidential"}')},
        )
        assert answer.json()["expires_at"] == answer.json()["created_at"] + 7 * 24 * 3600
        assert (tmp_path / "objects" / "files" / answer.json()["id"]).read_bytes() == b'{"prompt":"confidential"}'
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    lines = [json.loads(line) for line in output.splitlines()]
    (request,) = [line for line in lines if line["event"] == "request"]
    assert request["request_id"] == answer.headers["x-request-id"]
    assert (request["method"], request["path"], request["status"]) == ("POST", "/v1/files", 200)
    assert b"confidential" not in output
    assert key.encode() not in output
