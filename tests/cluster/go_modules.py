"""Source directories of required Go modules, which contain definitions of Kubernetes kinds."""

import json
import subprocess
from pathlib import Path


def module_directory(requiring: Path, module: str) -> Path:
    """Return the directory of a module's source.

    Args:
        requiring: directory of the module whose go.mod requires it.
        module: module path, e.g. ``sigs.k8s.io/kwok``.
    """
    # Programs may have been built earlier and the module cache cleared since then.
    command = ["go", "mod", "download", "-json", module]
    done = subprocess.run(command, cwd=requiring, stdout=subprocess.PIPE, check=True)
    return Path(json.loads(done.stdout)["Dir"])
