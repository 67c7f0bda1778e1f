"""Exports of the audit log: to stdout, to a file, and to a syslog server over TLS."""

import json
import re
import socket
import ssl
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner, Result

from service.audit.chain import seal_entries
from service.cli.app import app
from service.db import Pool
from service.projects import create_project

Export = Callable[..., Result]


@pytest.fixture
def export(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Export:
    """Run ``cloister audit export`` on a log with three sealed entries."""
    assert isinstance(pool.conninfo, str)
    monkeypatch.setenv("CLOISTER_DATABASE_URL", pool.conninfo)
    add(pool, "p0", "p1", "p2")
    return lambda *arguments: CliRunner().invoke(app, ["audit", "export", *map(str, arguments)])


def add(pool: Pool, *names: str) -> None:
    """Add sealed entries."""
    for name in names:
        create_project(pool, name)
    seal_entries(pool)


def exported(text: str) -> list[str]:
    return [json.loads(line)["data"]["name"] for line in text.splitlines()]


def test_export_prints_the_sealed_entries_after_one(export: Export, pool: Pool) -> None:
    create_project(pool, "not sealed")
    lines = export().stdout
    assert exported(lines) == ["p0", "p1", "p2"]
    first = json.loads(lines.splitlines()[0])
    assert exported(export("--since-seq", first["seq"]).stdout) == ["p1", "p2"]
    assert (first["position"], len(first["seal"]), first["type"]) == (1, 64, "project.created")


def test_export_appends_to_a_file_what_it_lacks(export: Export, pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    assert export("--to", path).exit_code == 0
    assert path.stat().st_mode & 0o777 == 0o600
    add(pool, "p3")
    complete = path.read_bytes()
    path.write_bytes(complete[:-20])  # the export was interrupted
    assert export("--to", path).exit_code == 0
    assert exported(path.read_text()) == ["p0", "p1", "p2", "p3"]
    assert path.read_bytes().startswith(complete)


def test_file_with_something_else_is_refused(export: Export, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")
    assert "is no entry of an audit log" in str(export("--to", path).exception)
    assert path.read_text() == "my notes\n"


class SyslogServer:
    """A receiver of RFC 5425: it reads frames until the sender ends the connection, and then ends it too."""

    def __init__(self, certificate: Path) -> None:
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"localhost:{self._listener.getsockname()[1]}"
        self.messages: list[str] = []
        self.is_failing = False
        self._thread = Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                plain, _ = self._listener.accept()
                # A sender may not trust this server.
                with suppress(ssl.SSLError), plain, self._context.wrap_socket(plain, server_side=True) as connection:
                    self._receive(connection)

    def _receive(self, connection: ssl.SSLSocket) -> None:
        if self.is_failing:
            # Linger for 0 s: the connection is reset.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        received = b""
        while chunk := connection.recv(4096):
            received += chunk
        while received:
            length, _, rest = received.partition(b" ")
            self.messages.append(rest[: int(length)].decode())
            received = rest[int(length) :]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost that signs itself, and its key, in one file."""
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    public = path.with_suffix(".crt")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(path)]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(["openssl", "req", "-x509", *key, *names, "-out", public], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + public.read_bytes())
    return path


@pytest.fixture
def syslog(certificate: Path) -> Iterator[SyslogServer]:
    server = SyslogServer(certificate)
    yield server
    server.close()


@pytest.fixture
def send(export: Export, syslog: SyslogServer, certificate: Path) -> Callable[..., Result]:
    server = ("--syslog-tls", syslog.address, "--ca", certificate.with_suffix(".crt"))
    return lambda *arguments: export(*server, *arguments)


def received(syslog: SyslogServer) -> list[str]:
    return [json.loads(message[message.index("{") :])["data"]["name"] for message in syslog.messages]


def test_syslog_server_gets_each_entry_once(send: Callable[..., Result], pool: Pool, syslog: SyslogServer) -> None:
    assert "sent 3 entries" in send().stdout
    assert "sent 0 entries" in send().stdout
    add(pool, "p3")
    send()
    assert received(syslog) == ["p0", "p1", "p2", "p3"]
    pattern = r"<109>1 \d{4}-\d\d-\d\dT[\d:.]{15}\+00:00 \S+ cloister - project\.created - \{.*\}"
    assert all(re.fullmatch(pattern, message) for message in syslog.messages)


def test_entries_are_sent_again_after_a_connection_that_broke(
    send: Callable[..., Result], syslog: SyslogServer
) -> None:
    syslog.is_failing = True
    assert "the next export continues here" in str(send().exception)
    syslog.is_failing = False
    assert send().exit_code == 0
    assert received(syslog) == ["p0", "p1", "p2"]


def test_entries_can_be_sent_again_from_one_on(send: Callable[..., Result], syslog: SyslogServer) -> None:
    send()
    send("--since-seq", 0)
    assert received(syslog) == ["p0", "p1", "p2"] * 2


def test_server_with_a_certificate_of_another_authority_gets_nothing(export: Export, syslog: SyslogServer) -> None:
    assert "certificate verify failed" in str(export("--syslog-tls", syslog.address).exception)
    assert syslog.messages == []


@pytest.mark.parametrize(
    "arguments",
    [("--to", "a", "--syslog-tls", "b:1"), ("--syslog-tls", "b"), ("--syslog-tls", "b:x"), ("--ca", "a")],
)
def test_contradictory_options_are_refused(export: Export, arguments: tuple[str, ...]) -> None:
    assert export(*arguments).exit_code == 2
