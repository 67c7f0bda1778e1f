"""An engine server without an engine: it answers each request with the request's own body.

``python echo_engine_server.py DIRECTORY [KEEP_ALIVE_S]`` serves with the configuration of the real engine server.
``/sleep`` never answers, and records when its caller is gone. ``/half`` breaks the connection in the middle of its
answer.
"""

import sys
from pathlib import Path
from typing import Any

import uvicorn

from ray_job.engines.engine_process import SOCKET
from ray_job.engines.engine_server import run_servers, server_config


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    if scope["path"] == "/sleep":
        assert (await receive())["type"] == "http.disconnect"
        (Path(sys.argv[1]) / "disconnected").touch()
        return
    half = scope["path"] == "/half"
    length = len(body) * 2 if half else len(body)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % length)]})
    await send({"type": "http.response.body", "body": body, "more_body": half})
    if half:
        with (Path(sys.argv[1]) / "halves").open("a") as file:
            file.write("x")


def serve(directory: Path) -> None:
    config = server_config(echo, directory / SOCKET, lifespan="off")
    if len(sys.argv) > 2:
        config.timeout_keep_alive = float(sys.argv[2])
    uvicorn.Server(config).run()


if __name__ == "__main__":
    run_servers(Path(sys.argv[1]), serve)
