"""GPU of a pod. The doctor sends this file to Python in a pod with the stack's Ray image: standard library and torch.

It prints one JSON object: ``devices``, ``smi`` (``nvidia-smi``'s answer, or why there is none), ``torch`` (name, memory
in MiB and compute capability), and ``error`` of the computation, empty if it was right.
"""

import json
import subprocess
import sys
from pathlib import Path

_QUERY = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader,nounits"]
_SIZE = 256


def main(dtype: str) -> None:
    """Multiply two matrices on the GPU, and print what is there.

    Args:
        dtype: torch's name of the data type.
    """
    found: dict[str, object] = {
        "devices": sorted(map(str, Path("/dev").glob("nvidia*"))),
        "smi": "",
        "torch": None,
        "error": "",
    }
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=30, check=False)
        found["smi"] = (done.stdout or done.stderr).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        found["smi"] = str(error)
    try:
        import torch

        properties = torch.cuda.get_device_properties(0)
        found["torch"] = {
            "name": properties.name,
            "memory_mib": properties.total_memory >> 20,
            "capability": [properties.major, properties.minor],
        }
        ones = torch.ones((_SIZE, _SIZE), dtype=getattr(torch, dtype), device="cuda")
        product = float((ones @ ones)[0, 0])
        found["error"] = "" if product == _SIZE else f"a product of matrices is {product}, not {_SIZE}"
    except Exception as error:  # noqa: BLE001 - whatever fails is the result
        found["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
