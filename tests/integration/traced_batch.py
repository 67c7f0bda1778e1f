"""A batch from its upload to its end, with content that no span may hold: real API, Postgres, reconciler and leases."""

import json
from pathlib import Path

import httpx

from service.adapters.directory_object_store import DirectoryObjectStore
from service.api.app import create_app
from service.api_keys import create_api_key
from service.backends import Backends
from service.db import Pool
from service.projects import create_project
from service.traces import Span, Traces
from tests.integration.reconciler_harness import CHAT, Stack
from tests.security.serving import served

CANARY = "CANARY-4711-zebra"


class Spans(list[Span]):
    """Spans in memory."""

    def export(self, span: Span) -> None:
        self.append(span)


def traced_batch(pool: Pool, directory: Path, traces: Traces, *, input_file_id: str = "") -> str:
    """Run a batch of three lines whose answers are in two parts, and return its id.

    Args:
        pool: the database.
        directory: the directory of the objects.
        traces: the spans of all processes.
        input_file_id: the input file, if not the one that is uploaded; the batch fails.
    """
    stack = Stack(pool, DirectoryObjectStore(directory / "objects"), directory, traces=traces)
    app = create_app(Backends(pool=pool, store=stack.store, catalogue=stack.backends.catalogue, traces=traces))
    key = create_api_key(pool, project_id=create_project(pool, "traced").id, name="test")
    body = {"model": "demo", "messages": [{"role": "user", "content": CANARY}], "user": CANARY}
    lines = [
        json.dumps({"custom_id": f"{CANARY}-{n}", "method": "POST", "url": CHAT, "body": body | {"seed": n}})
        for n in range(3)
    ]
    with served(app) as url, httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}) as client:
        file = client.post(
            "/v1/files",
            data={"purpose": "batch"},
            files={"file": (f"{CANARY}.jsonl", "\n".join(lines).encode())},
        ).json()
        request = {"input_file_id": input_file_id or file["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch_id: str = client.post("/v1/batches", json=request | {"metadata": {CANARY: CANARY}}).json()["id"]
    if stack.advance(batch_id)["status"] == "failed":
        return batch_id
    job = stack.job()
    job.lease()
    answer = json.dumps({"object": "chat.completion", "content": CANARY}).encode()
    assert job.commit(1, batch_id=batch_id, body=answer)
    assert job.commit(2, 3, batch_id=batch_id, body=answer, fails=True)
    while stack.advance(batch_id)["status"] != "completed":
        pass
    return batch_id
