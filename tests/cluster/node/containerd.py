"""containerd of one node, as Debian has it (1.6, settings of version 2)."""

import json
import socket
from pathlib import Path

from tests.cluster.node.layout import PATH, NodeLayout
from tests.cluster.node.namespaces import inside
from tests.cluster.processes import Process


def containerd(node: NodeLayout, namespaces: Process, *, pause_image: str) -> Process:
    """The process.

    Args:
        node: whose it is.
        namespaces: the node's, running.
        pause_image: what holds a pod's network; a reference that is among the images.
    """
    file = node.state / "containerd.toml"
    file.write_text(_settings(node, pause_image))
    command = inside(namespaces, ["containerd", f"--config={file}"])
    return Process(
        command,
        log=node.state / "containerd.log",
        environment={"PATH": PATH},
        is_ready=lambda: _accepts(node.socket),
        detached=True,
    )


def _settings(node: NodeLayout, pause_image: str) -> str:
    # TOML's strings are JSON's.
    return f"""
version = 2
root = {json.dumps(str(node.images))}
state = {json.dumps(str(node.run / "containerd"))}

[grpc]
address = {json.dumps(str(node.socket))}

[plugins."io.containerd.internal.v1.opt"]
path = {json.dumps(str(node.state / "opt"))}

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = {json.dumps(pause_image)}
# Both take rights that root has not everywhere, e.g. in a container.
restrict_oom_score_adj = true
disable_apparmor = true
netns_mounts_under_state_dir = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = {json.dumps(str(node.state / "cni-networks"))}

[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "runc"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True
