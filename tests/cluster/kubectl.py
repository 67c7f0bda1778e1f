"""kubectl, for tasks that take more than one request: logs, and commands in containers."""

import subprocess

from tests.cluster.control_plane import ControlPlane


def kubectl(cluster: ControlPlane, *arguments: str, timeout_s: float = 60) -> str:
    """Run kubectl as the administrator and return its output.

    Raises:
        AssertionError: it failed; the message contains its output.
    """
    command = [str(cluster.bin / "kubectl"), f"--kubeconfig={cluster.kubeconfig}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}{done.stdout}"
    return done.stdout
