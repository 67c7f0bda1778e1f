"""Prints the custom ids of the lines that vLLM's run_batch accepts.

If its request model refuses one line, run_batch rejects the whole file, so such lines go to vLLM's HTTP server.
Run as ``python batch_lines_taken.py FILE``. It imports vLLM, which a test process should not do.
"""

import sys
from pathlib import Path

from vllm.entrypoints.launchers.run_batch import BatchRequestInput

SUPPORTED = ("/v1/chat/completions", "/v1/embeddings")


def main() -> None:
    for line in Path(sys.argv[1]).read_text().splitlines():
        try:
            request = BatchRequestInput.model_validate_json(line)
        except Exception:  # noqa: BLE001, S112 - any error here would end run_batch
            continue
        if request.url in SUPPORTED:
            print(request.custom_id)  # noqa: T201 - read by the caller


if __name__ == "__main__":
    main()
