"""A node's own view of this machine: a mount and a process namespace.

Directories that a kubelet and containerd have by fixed names are the node's own there, so that two nodes do not meet,
and whatever they mount or start ends with the namespaces: with the one process that holds them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.cluster.node.layout import PATH, NodeLayout
from tests.cluster.processes import Process

# Kept on the disk, by the name below the node's state; what is in memory is below its other directory.
_ON_DISK: Final = {
    "kubelet": "/var/lib/kubelet",
    "cni": "/var/lib/cni",
    "pod-logs": "/var/log/pods",
    "container-logs": "/var/log/containers",
}
_IN_MEMORY: Final = {"containerd": "/run/containerd"}
MOUNT_POINTS: Final = (*map(Path, _ON_DISK.values()), *map(Path, _IN_MEMORY.values()))
# The first process of the namespace inherits the orphans in it and has to bury them, as a shell does that waits.
_FIRST_PROCESS: Final = """
while [ "$#" -gt 1 ]; do mount --bind "$1" "$2"; shift 2; done
touch "$1"
sleep infinity &
wait
"""


def namespaces(node: NodeLayout) -> Process:
    """The process that holds them. It ends, and everything in them ends."""
    binds: list[str] = []
    for base, directories in ((node.state, _ON_DISK), (node.run, _IN_MEMORY)):
        for name, path in directories.items():
            (base / name).mkdir(parents=True)
            binds += [str(base / name), path]
    ready = node.run / "namespaces"
    # Mounts of the machine come and go in it too: a copy would keep those of others from being removed.
    unshare = ["unshare", "--mount", "--propagation=slave", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*unshare, "sh", "-ec", _FIRST_PROCESS, node.name, *binds, str(ready)]
    log = node.state / "namespaces.log"
    return Process(command, log=log, is_ready=ready.exists, environment={"PATH": PATH}, detached=True)


def inside(namespaces: Process, command: Sequence[str]) -> list[str]:
    """The command line that runs a program in them.

    Args:
        namespaces: what holds them, running.
        command: the program with its arguments.
    """
    held = f"/proc/{namespaces.pid}/ns"
    return ["nsenter", f"--mount={held}/mnt", f"--pid={held}/pid_for_children", *command]
