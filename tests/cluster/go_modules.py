"""Where Go keeps the source of a module that one of this folder's modules requires: definitions of kinds lie there."""

import json
import subprocess
from pathlib import Path


def module_directory(requiring: Path, module: str) -> Path:
    """The directory of a module's source.

    Args:
        requiring: the directory of the module whose go.mod names the version.
        module: its path, e.g. ``sigs.k8s.io/kwok``.
    """
    # Programs that were built before do not mean that their source is still here.
    command = ["go", "mod", "download", "-json", module]
    done = subprocess.run(command, cwd=requiring, stdout=subprocess.PIPE, check=True)
    return Path(json.loads(done.stdout)["Dir"])
