"""Real TLS servers on loopback whose certificates are signed by a private authority."""

import ipaddress
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

CONTENT = b"content"


@dataclass(frozen=True)
class Authority:
    """A certificate authority, and the certificate of a server that it signed: for localhost and 127.0.0.1."""

    ca_file: Path
    server: ssl.SSLContext


def make_authority(directory: Path) -> Authority:
    directory.mkdir()
    start = datetime.now(UTC) - timedelta(hours=1)
    ca_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority {directory.name}")])
    server_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])

    def certificate(subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType) -> bytes:
        builder = x509.CertificateBuilder(ca_name, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(start).not_valid_after(start + timedelta(days=1))
        signed = builder.add_extension(extension, critical=True).sign(ca_key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    ca_file, chain, key_file = (directory / name for name in ("ca.crt", "server.crt", "server.key"))
    ca_file.write_bytes(certificate(ca_name, ca_key, x509.BasicConstraints(ca=True, path_length=None)))
    hosts = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    chain.write_bytes(certificate(server_name, server_key, hosts))
    key_file.write_bytes(
        server_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key_file)
    return Authority(ca_file=ca_file, server=context)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-length", str(len(CONTENT)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(CONTENT)

    do_HEAD = do_PUT = do_POST = do_GET  # noqa: N815 - the names of http.server

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Ignore clients that refuse the certificate."""


@contextmanager
def https_server(authority: Authority) -> Iterator[int]:
    """Serve ``CONTENT`` at every path, and yield the port."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.socket = authority.server.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


@contextmanager
def postgres_with_tls(authority: Authority, unix_socket: str) -> Iterator[int]:
    """Serve a Postgres, which itself has no TLS, with TLS, and yield the port.

    The client asks for TLS with 8 bytes, and the server agrees with one:
    https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-SSL
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            shutil.copyfileobj(source.makefile("rb", buffering=0), target.makefile("wb", buffering=0))
            target.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                client.recv(8)
                client.sendall(b"S")
                try:
                    encrypted = authority.server.wrap_socket(client, server_side=True)
                except OSError:
                    continue
                server = socket.socket(socket.AF_UNIX)
                server.connect(unix_socket)
                for pair in ((encrypted, server), (server, encrypted)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()
