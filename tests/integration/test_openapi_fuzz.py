"""Property tests of the running service, generated from its served OpenAPI document."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn

from ray_job.contract.job_spec import ModelSpec
from service.adapters.memory_object_store import MemoryObjectStore
from service.api.app import Server, create_app
from service.api.watching import Watching
from service.api.wrong_keys import WrongKeys
from service.api_keys import Scope, create_api_key
from service.backends import Backends
from service.db import Pool
from service.model_catalogue import CatalogueModel
from service.projects import create_project
from tests.integration.reconciler_harness import KEYS

pytestmark = pytest.mark.slow

CASES = int(os.environ.get("CLOISTER_FUZZ_CASES", "1000"))
"""The least number of requests that the test generates; `make fuzz` sends 10,000."""
# All checks but two. A request can be invalid for reasons that no schema expresses: an unknown cursor, a reused
# idempotency key. In a form everything is text: a file whose content is `-72` is as good as any other.
# Source of the format: https://schemathesis.readthedocs.io/en/stable/reference/configuration/
CONFIGURATION = """
checks.positive_data_acceptance.enabled = false
[[operations]]
include-name = "POST /v1/files"
checks.positive_data_acceptance.enabled = false
checks.negative_data_rejection.enabled = false
"""


@pytest.fixture
def served(api_pool: Pool) -> Iterator[str]:
    """The served API. Event streams end soon, because no batch ends here."""
    models = {"demo/small": CatalogueModel(spec=ModelSpec(id="demo/small", source="x"))}
    backends = Backends(pool=api_pool, store=MemoryObjectStore(), catalogue=models, encryption_keys=KEYS)
    # It sends hundreds of wrong keys, and expects 401 for each.
    wrong_keys = WrongKeys(api_pool, limit=100_000)
    app = create_app(backends, watching=Watching(backends.pool, max_stream_s=0.05), wrong_keys=wrong_keys)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False)
    server = Server(config, app.state.watching)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def powerful_key(api_pool: Pool) -> str:
    """A key with all scopes."""
    project = create_project(api_pool, "fuzzed")
    return create_api_key(api_pool, project_id=project.id, name="fuzz", scopes=Scope)


def counted_requests(base_url: str) -> dict[str, int]:
    """Requests by status, from the metrics of the service."""
    counts: dict[str, int] = {}
    for line in httpx.get(f"{base_url}/metrics").text.splitlines():
        if found := re.match(r'cloister_http_requests_total\{.*route="/v1.*status="(\d+)"\} (\d+)', line):
            counts[found[1]] = counts.get(found[1], 0) + int(found[2])
    return counts


@pytest.mark.timeout(4 * 3600)
def test_thousands_of_requests_are_answered_according_to_the_schema(
    served: str, powerful_key: str, tmp_path: Path
) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIGURATION)
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{served}/openapi.json",
        "--header", f"Authorization: Bearer {powerful_key}",
        "--phases", "examples,coverage,fuzzing,stateful",
        "--max-examples", str(CASES // 20), "--generation-deterministic",
        "--request-timeout", "20", "--workers", "1", "--continue-on-failure",
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-20_000:] + ended.stderr[-2_000:]
    generated = re.search(r"(\d+) generated, \1 passed", ended.stdout)
    assert generated, ended.stdout
    assert int(generated[1]) >= CASES
    assert "Authentication failed" not in ended.stdout
    counts = counted_requests(served)
    assert sum(counts.values()) >= CASES
    assert {"200", "400", "401", "404"} <= counts.keys()
    assert not {status for status in counts if status.startswith("5")}
