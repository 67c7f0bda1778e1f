"""Mount and process namespace of a node.

A kubelet and containerd use directories with fixed names. In the namespace each node has its own, so that two nodes do
not collide. Mounts and processes end with the namespaces, that is, with the one process that holds them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.cluster.node.layout import PATH, NodeLayout
from tests.cluster.processes import Process

# On disk, by the name below the node's state directory; _IN_MEMORY below its runtime directory.
_ON_DISK: Final = {
    "kubelet": "/var/lib/kubelet",
    "cni": "/var/lib/cni",
    "pod-logs": "/var/log/pods",
    "container-logs": "/var/log/containers",
}
_IN_MEMORY: Final = {"containerd": "/run/containerd"}
MOUNT_POINTS: Final = (*map(Path, _ON_DISK.values()), *map(Path, _IN_MEMORY.values()))
# The first process of the namespace becomes the parent of orphans and must reap them, as a waiting shell does.
_FIRST_PROCESS: Final = """
while [ "$#" -gt 1 ]; do mount --bind "$1" "$2"; shift 2; done
touch "$1"
sleep infinity &
wait
"""


def namespaces(node: NodeLayout) -> Process:
    """Return the process that holds the namespaces; everything in them ends with it."""
    binds: list[str] = []
    for base, directories in ((node.state, _ON_DISK), (node.run, _IN_MEMORY)):
        for name, path in directories.items():
            (base / name).mkdir(parents=True)
            binds += [str(base / name), path]
    ready = node.run / "namespaces"
    # Mounts of the machine propagate into it: a copy would prevent others from removing theirs.
    unshare = ["unshare", "--mount", "--propagation=slave", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*unshare, "sh", "-ec", _FIRST_PROCESS, node.name, *binds, str(ready)]
    log = node.state / "namespaces.log"
    return Process(command, log=log, is_ready=ready.exists, environment={"PATH": PATH}, detached=True)


def inside(namespaces: Process, command: Sequence[str]) -> list[str]:
    """Return the command line that runs a program in the namespaces.

    Args:
        namespaces: the running process that holds them.
        command: the program with its arguments.
    """
    held = f"/proc/{namespaces.pid}/ns"
    return ["nsenter", f"--mount={held}/mnt", f"--pid={held}/pid_for_children", *command]
