"""The directory that the Pulumi CLI runs for a stack; ``Pulumi.yaml`` names it."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # The CLI runs this directory as a script: its modules would be top-level modules, and `infra` would not exist.
    root = Path(__file__).resolve().parents[1]
    sys.path[:] = [str(root), *(entry for entry in sys.path if Path(entry or ".").resolve() != root / "infra")]

    from infra.program import run

    run()
