"""The HTTP server around the application."""

import socket

import uvicorn

from service.api.watching import Watching


class Server(uvicorn.Server):
    """uvicorn, which ends event streams when it is told to stop, before it waits for the requests that run."""

    def __init__(self, config: uvicorn.Config, watching: Watching) -> None:
        super().__init__(config)
        self._watching = watching

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops to accept, ends the streams, waits for the other requests."""
        self._watching.stop()
        await super().shutdown(sockets)
