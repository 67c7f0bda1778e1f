"""``cloister capacity``: slots, GPUs and queues of a stack."""

from typing import Any

from service.cli.options import DEFAULT_DATA_DIR, ClientDataDir
from service.client.connection import open_client
from service.client.terminal import console, duration, print_table


def capacity(*, data_dir: ClientDataDir = DEFAULT_DATA_DIR) -> None:
    """Show slots and GPUs by accelerator, and the queue of each model. The API key needs the scope operator."""
    with open_client(data_dir) as client:
        found: dict[str, Any] = client.get("/capacity", cast_to=dict[str, Any])
    target = console()
    heads: tuple[str, ...] = ("accelerator", "slots", "running", "queued", "GPUs", "used", "free")
    rows = [
        [
            each["accelerator"],
            *(str(each["jobs"][name]) for name in ("slots", "running", "queued")),
            *(str(each["gpus"][name]) for name in ("total", "used", "free")),
        ]
        for each in found["accelerators"]
    ]
    print_table(target, heads, rows, right=heads[1:])
    print(file=target.file)
    heads = ("model", "accelerator", "jobs", "engines", "batches", "rows", "tokens", "next start in")
    counts = ("running_jobs", "engines", "queued_batches", "queued_rows", "queued_tokens")
    rows = [
        [
            each["model"],
            each["accelerator"],
            *(f"{each[name]:,}" for name in counts),
            "unknown" if each["expected_start_seconds"] is None else duration(each["expected_start_seconds"]),
        ]
        for each in found["models"]
    ]
    print_table(target, heads, rows, right=heads[2:])
