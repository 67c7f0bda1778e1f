"""Progress reports over a connection that fails."""

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from ray_job.contract.job_spec import JobSpec, ModelSpec, ObjectStoreLocation
from ray_job.progress import ProgressReporter, Totals

_LIMITS = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
# Postgres' messages to a new client: authentication is done, and it is ready for a query.
_READY = b"R\0\0\0\x08\0\0\0\0" + b"Z\0\0\0\x05I"


def spec(port: int) -> JobSpec:
    return JobSpec(
        job_id="batch_a-1",
        batch_id="batch_a",
        attempt=1,
        endpoint="/v1/embeddings",
        input_key="files/a",
        object_store=ObjectStoreLocation(kind="directory"),
        database_url=f"postgresql://job@127.0.0.1:{port}/a?sslmode=disable&gssencmode=disable",
        model=ModelSpec(id="a", source="/models/a"),
    )


def limits_of_connections_to(port: int) -> list[list[int]]:
    """Return the TCP limits of each socket of this process that is connected to the port."""
    found = []
    for descriptor in filter(Path.is_socket, Path("/proc/self/fd").iterdir()):
        with socket.socket(fileno=os.dup(int(descriptor.name))) as own, suppress(OSError):  # some have no peer
            if own.getpeername() == ("127.0.0.1", port):
                found.append([own.getsockopt(socket.IPPROTO_TCP, limit) for limit in _LIMITS])
    return found


def test_reports_pause_after_one_that_could_not_connect() -> None:
    now = [0.0]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    reporter = ProgressReporter(spec(port), clock=lambda: now[0])
    reporter.report(Totals())  # nothing listens on the port any more
    with socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(0)
        for now[0] in (1.0, 29.0):
            reporter.report(Totals())
        with pytest.raises(BlockingIOError):
            server.accept()
        thread = threading.Thread(target=reporter.report, args=(Totals(),))
        now[0] = 31.0
        thread.start()
        server.settimeout(10)
        server.accept()[0].close()
        thread.join()


def test_database_that_stops_responding_is_given_up_after_25_seconds() -> None:
    found: list[list[int]] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(_READY)
                connection.recv(1024)
                found.extend(limits_of_connections_to(port))

        thread = threading.Thread(target=serve)
        thread.start()
        ProgressReporter(spec(port)).report(Totals(), final=True)
        thread.join()
    assert found == [[10, 5, 3, 25_000]]
