"""Prints the custom ids of the lines that vLLM's run_batch can read.

One line that its request model refuses makes run_batch give up the whole file, so those go elsewhere.
Run as ``python batch_lines_taken.py FILE``; it imports vLLM, which a test process should not.
"""

import sys
from pathlib import Path

from vllm.entrypoints.launchers.run_batch import BatchRequestInput

SUPPORTED = ("/v1/chat/completions", "/v1/embeddings")


def main() -> None:
    for line in Path(sys.argv[1]).read_text().splitlines():
        try:
            request = BatchRequestInput.model_validate_json(line)
        except Exception:  # noqa: BLE001, S112 - whatever it raises here ends run_batch
            continue
        if request.url in SUPPORTED:
            print(request.custom_id)  # noqa: T201 - read by the caller


if __name__ == "__main__":
    main()
