"""kubectl, for what is more than one request: logs, and commands in containers."""

import subprocess

from tests.cluster.control_plane import ControlPlane


def kubectl(cluster: ControlPlane, *arguments: str, timeout_s: float = 60) -> str:
    """What it prints, as the administrator.

    Raises:
        AssertionError: it failed; the message is its own.
    """
    command = [str(cluster.bin / "kubectl"), f"--kubeconfig={cluster.kubeconfig}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}{done.stdout}"
    return done.stdout
