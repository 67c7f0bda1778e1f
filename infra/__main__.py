"""What `pulumi up` runs: see ``Pulumi.yaml``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # The CLI runs this directory as a script, so its modules would be found as top-level ones and `infra` not at all.
    root = Path(__file__).resolve().parents[1]
    sys.path[:] = [str(root), *(entry for entry in sys.path if Path(entry or ".").resolve() != root / "infra")]

    from infra.program import run

    run()
