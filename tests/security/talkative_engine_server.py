"""An engine server that prints each request and dies of it, and whose second start fails.

``python talkative_engine_server.py DIRECTORY`` serves with the configuration of the real engine server.
"""

import os
import sys
from pathlib import Path
from typing import Any

import uvicorn

from ray_job.engines.engine_process import SOCKET
from ray_job.engines.engine_server import run_servers, server_config


async def die(scope: Any, receive: Any, send: Any) -> None:
    del scope, send
    print("cannot handle", (await receive())["body"], flush=True)  # noqa: T201 - what this server is for
    os._exit(1)


def serve(directory: Path) -> None:
    if directory.name != "1":
        print("no memory is left", flush=True)  # noqa: T201
        raise SystemExit(1)
    uvicorn.Server(server_config(die, directory / SOCKET, lifespan="off")).run()


if __name__ == "__main__":
    run_servers(Path(sys.argv[1]), serve)
