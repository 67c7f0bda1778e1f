"""Ray's head node, the only node of a local Ray cluster."""

import contextlib
import os
import secrets
import shutil
import socket
import sys
from pathlib import Path

import httpx
import psutil

from service.local.layout import Layout, write_private_file

OBJECT_STORE_BYTES = 512 * 1024 * 1024
# The stages that read, prepare and write, the job's supervisor and driver, and the engine each reserve (fractions of)
# CPUs. With fewer logical CPUs than this, a small machine would wait forever.
LEAST_LOGICAL_CPUS = 4
# Ephemeral ports start at 32768 on Linux; Ray's workers have 10002 to 19999.
FREE_PORT_RANGE = range(20_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Return different TCP ports that no socket of this machine uses now.

    Servers bind them seconds later. Until then the kernel must not give them to an outgoing connection, so they lie
    below the range of ephemeral ports, and above the range from which Ray chooses ports for its workers.
    """
    found: set[int] = set()
    while len(found) < count:
        port = secrets.choice(FREE_PORT_RANGE)
        with socket.socket() as opened, contextlib.suppress(OSError):
            opened.bind(("", port))
            found.add(port)
    return list(found)


def command(layout: Layout, *, dashboard_port: int) -> list[str]:
    """Return the command that runs Ray in the foreground.

    Only the port of the Jobs API has to stay the same after a restart. Ray's object store gets a modest part of the
    memory, and no more than /dev/shm has, which is 64 MB in a plain container.
    """
    shared = Path("/dev/shm")  # noqa: S108 - the kernel's directory
    shared_bytes = shutil.disk_usage(shared).free if shared.exists() else OBJECT_STORE_BYTES
    room_bytes = min(OBJECT_STORE_BYTES, shared_bytes // 2, psutil.virtual_memory().available // 4)
    agent_port, client_port = free_ports(2)
    options = {
        "node-ip-address": "127.0.0.1",
        "port": "0",
        "temp-dir": str(layout.ray_dir),
        "object-spilling-directory": str(layout.ray_spill_dir),
        "include-dashboard": "true",
        "dashboard-host": "127.0.0.1",
        "dashboard-port": str(dashboard_port),
        "dashboard-agent-listen-port": str(agent_port),
        "ray-client-server-port": str(client_port),
        "num-cpus": str(max(LEAST_LOGICAL_CPUS, os.cpu_count() or 1)),
        "object-store-memory": str(max(80_000_000, room_bytes)),
    }
    program = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    return [*program, *(f"--{name}={value}" for name, value in options.items())]


def make_token(layout: Layout) -> None:
    """Create a new token, readable by this account only."""
    write_private_file(layout.ray_token, secrets.token_hex(32))


def answers(layout: Layout, dashboard_port: int) -> bool:
    """Return whether the Jobs API answers."""
    headers = {"Authorization": f"Bearer {layout.ray_token.read_text()}"}
    try:
        answer = httpx.get(f"http://127.0.0.1:{dashboard_port}/api/jobs/", headers=headers, timeout=5, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == httpx.codes.OK
