"""A containerd that imports and unpacks images and runs no containers."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.cluster.processes import Process

_PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"
_SETTINGS: Final = """
version = 2
root = {root}
state = {state}
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]

[grpc]
address = {socket}

[plugins."io.containerd.gc.v1.scheduler"]
startup_delay = "0s"
schedule_delay = "{delay_s}s"
"""


@contextmanager
def containerd_for_images(root: Path, *, collects: bool = False) -> Iterator[Path]:
    """Run containerd until the block ends or this process is killed.

    Args:
        root: directory for its data.
        collects: delete blobs that no image refers to. Off during imports, where an image's name comes after its blobs.

    Returns:
        Its socket.
    """
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="containerd-") as name:
        directory = Path(name)
        socket, settings = directory / "socket", directory / "settings.toml"
        paths = {"root": root, "state": directory / "state", "socket": socket}
        # JSON strings are valid TOML.
        written = {key: json.dumps(str(path)) for key, path in paths.items()}
        settings.write_text(_SETTINGS.format(**written, delay_s=0 if collects else 3_600))
        # Its mounts end with it, however it ends.
        own_mounts = ["unshare", "--mount", "--propagation=private"]
        command = ["setpriv", "--pdeathsig=KILL", *own_mounts, "containerd", f"--config={settings}"]
        log = directory / "containerd.log"
        with Process(command, log=log, is_ready=socket.is_socket, environment={"PATH": _PATH}):
            yield socket
