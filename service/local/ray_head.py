"""Ray's head node, which is the whole of a local Ray."""

import os
import secrets
import shutil
import socket
import sys
from pathlib import Path

import httpx
import psutil

from service.local.layout import Layout

OBJECT_STORE_BYTES = 512 * 1024 * 1024
# Reading, preparing and writing stages, the job's supervisor and driver, and the engine all reserve
# (fractions of) CPUs: with fewer logical CPUs than this a small machine would wait for ever.
LEAST_LOGICAL_CPUS = 4


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [int(opened.getsockname()[1]) for opened in sockets]
    finally:
        for opened in sockets:
            opened.close()


def object_store_bytes() -> int:
    """Memory for Ray's object store: modest, and no more than /dev/shm has (64 MB in a plain container)."""
    shared = Path("/dev/shm")  # noqa: S108 - the place of shared memory
    room = shutil.disk_usage(shared).free if shared.exists() else OBJECT_STORE_BYTES
    return max(80_000_000, min(OBJECT_STORE_BYTES, room // 2, psutil.virtual_memory().available // 4))


def command(layout: Layout, *, dashboard_port: int) -> list[str]:
    """Starts Ray in the foreground; only the Jobs API's port must stay the same after a restart."""
    cpus = max(LEAST_LOGICAL_CPUS, os.cpu_count() or 1)
    agent_port, client_port = free_ports(2)
    options = {
        "node-ip-address": "127.0.0.1",
        "port": "0",
        "temp-dir": str(layout.ray_dir),
        "include-dashboard": "true",
        "dashboard-host": "127.0.0.1",
        "dashboard-port": str(dashboard_port),
        "dashboard-agent-listen-port": str(agent_port),
        "ray-client-server-port": str(client_port),
        "num-cpus": str(cpus),
        "object-store-memory": str(object_store_bytes()),
    }
    program = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    return [*program, *(f"--{name}={value}" for name, value in options.items())]


def make_token(layout: Layout) -> None:
    """Makes the token of this run, readable by this account only."""
    descriptor = os.open(layout.ray_token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))


def answers(layout: Layout, dashboard_port: int) -> bool:
    """Whether the Jobs API answers."""
    headers = {"Authorization": f"Bearer {layout.ray_token.read_text()}"}
    try:
        answer = httpx.get(f"http://127.0.0.1:{dashboard_port}/api/jobs/", headers=headers, timeout=5, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == httpx.codes.OK
