"""containerd of one node, in Debian's version (1.6, configuration version 2)."""

import json
import socket
from pathlib import Path

from tests.cluster.node.layout import PATH, NodeLayout
from tests.cluster.node.namespaces import inside
from tests.cluster.processes import Process


def containerd(node: NodeLayout, namespaces: Process, *, pause_image: str) -> Process:
    """Return containerd as a process.

    Args:
        node: node of the containerd.
        namespaces: running process that holds the node's namespaces.
        pause_image: reference of the image that holds a pod's network; one of the imported images.
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
    # JSON strings are valid TOML.
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
