"""Measures the assembly of result files from parts, with a store that takes time for each request."""

import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from ray_job.contract.lines import response_line
from ray_job.contract.object_keys import part_key
from ray_job.contract.parts import PartRow, Usage, encode_part
from service.adapters.memory_object_store import MemoryObjectStore
from service.assembly import assemble
from service.ports import StoredObject
from service.workspace import Workspace

LINES: Final = 50_000
PARTS: Final = 400
LATENCY_S: Final = 0.020
_BATCH: Final = "batch_bench"
_TEXT: Final = "word " * 60


class SlowObjectStore(MemoryObjectStore):
    """An object store in memory that takes ``latency_s`` for each request."""

    latency_s = 0.0

    def put(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        time.sleep(self.latency_s)
        return super().put(key, chunks)

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        time.sleep(self.latency_s)
        return super().read(key, start=start)

    def keys(self, prefix: str) -> Iterator[str]:
        time.sleep(self.latency_s)
        return super().keys(prefix)

    def delete(self, key: str) -> tuple[str, ...]:
        time.sleep(self.latency_s)
        return super().delete(key)


def assembly_seconds() -> float:
    """Return the seconds that the assembly takes."""
    store = SlowObjectStore()
    for part in range(PARTS):
        rows = [_row(line) for line in range(part, LINES, PARTS)]
        store.put(part_key(_BATCH, [row.line for row in rows]), [encode_part(_BATCH, rows)])
    store.latency_s = LATENCY_S
    with tempfile.TemporaryDirectory(prefix="bench-assembly-") as directory:
        started = time.monotonic()
        done = assemble(
            store,
            batch_id=_BATCH,
            output_key="output",
            error_key="error",
            workspace=Workspace(Path(directory), None),
        )
        seconds = time.monotonic() - started
    if done.completed != LINES:
        raise RuntimeError(f"{done.completed} of {LINES} lines were assembled")
    return seconds


def _row(line: int) -> PartRow:
    body = json.dumps({"choices": [{"message": {"content": f"{line} {_TEXT}"}}]}).encode()
    data = response_line(_BATCH, line, f"r{line}", 200, body)
    return PartRow(line=line, outcome="completed", data=data, usage=Usage(input_tokens=10, output_tokens=60))
