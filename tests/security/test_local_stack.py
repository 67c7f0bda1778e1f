"""A whole ``cloister local``: the content of a batch is in the object store only, and no other user reads anything.

Crashes write nothing either.
"""

import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import psycopg
import pytest

from ray_job.demo_model import make_demo_model
from tests.acceptance.interruptions import processes
from tests.acceptance.local_stack import MODEL, REPOSITORY, LocalStack

pytestmark = pytest.mark.ray

CANARY = "CANARY-4711-zebra"
NOBODY = 65534


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    """A running stack in directories that every user may look for, with the demo model."""
    place = Path(tempfile.mkdtemp(prefix="sx"))
    place.chmod(0o755)
    private = place / "run"
    private.mkdir(mode=0o700)
    core_limits = resource.getrlimit(resource.RLIMIT_CORE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(private))
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        patch.chdir(private)  # where its processes would write core files
        make_demo_model(MODEL)
        stack = LocalStack(place, MODEL)
        assert stack.layout.runtime_dir.parent == private
        try:
            # As on a machine with core dumps.
            resource.setrlimit(resource.RLIMIT_CORE, (core_limits[1], core_limits[1]))
            stack.start()
            yield stack
        finally:
            resource.setrlimit(resource.RLIMIT_CORE, core_limits)
            stack.stop()
            shutil.rmtree(place)


@pytest.fixture(scope="module")
def batch(stack: LocalStack) -> openai.types.Batch:
    """A completed batch whose lines, good and refused, all hold the canary."""
    lines = [
        {
            "custom_id": f"{CANARY}-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "demo", "messages": [{"role": "user", "content": CANARY}], "max_tokens": 4} | changes,
        }
        for number, changes in enumerate([{}, {}, {"temperature": -1}, {"tool_choice": CANARY}, {"top_p": CANARY}])
    ]
    known = stack.client
    with openai.OpenAI(base_url=known.base_url, api_key=known.api_key) as client:
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        deadline = time.monotonic() + 300
        while batch.status not in {"completed", "failed"}:
            assert time.monotonic() < deadline
            time.sleep(1)
            batch = client.batches.retrieve(batch.id)
        assert batch.error_file_id is not None
        assert CANARY in client.files.content(batch.error_file_id).text
    return batch


def test_content_is_in_the_object_store_only(stack: LocalStack, batch: openai.types.Batch) -> None:
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 3)
    roots = (stack.layout.data_dir, stack.layout.runtime_dir)
    files = [path for root in roots for path in root.rglob("*") if path.is_file()]
    assert any(path.parent == stack.layout.logs for path in files)
    assert any(path.name == "log" and path.parent.name.startswith("engine-") for path in files)
    holding = {path for path in files if CANARY.encode() in path.read_bytes()}
    assert holding
    assert {path for path in holding if not path.is_relative_to(stack.layout.objects)} == set()
    assert CANARY not in batch.model_dump_json()


def test_content_is_in_no_table(stack: LocalStack, batch: openai.types.Batch) -> None:
    del batch
    with psycopg.connect(stack.layout.database_url("cloister")) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        for (table,) in tables:
            rows = connection.execute(f'SELECT t::text FROM "{table}" AS t').fetchall()  # type: ignore[arg-type] # noqa: S608
            assert CANARY not in str(rows), table


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_CORE)[1] == 0, reason="this machine writes no core dumps")
@pytest.mark.usefixtures("batch")
def test_driver_worker_and_engine_dump_no_core(stack: LocalStack) -> None:
    limits = {
        kind: {resource.prlimit(process.pid, resource.RLIMIT_CORE)[0] for process in processes(stack, kind)}
        for kind in ("raylet", "driver", "actor", "engine server", "engine core")
    }
    assert 0 not in limits.pop("raylet")
    assert [kind for kind, found in limits.items() if found != {0}] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a program as another user")
@pytest.mark.usefixtures("batch")
def test_another_user_reads_nothing(stack: LocalStack) -> None:
    layout = stack.layout
    for path in (
        layout.ray_token,
        layout.client_env,
        layout.objects,
        layout.logs,
        layout.ray_dir,
        layout.temporary_dir,
    ):
        assert path.exists()
        program = ["/bin/sh", "-c", f"ls {path} || cat {path}"]
        done = subprocess.run(
            program, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=False, cwd="/"
        )
        assert done.returncode != 0
