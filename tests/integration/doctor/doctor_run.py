"""One run of `cloister doctor`, and an HTTP server whose answers a test chooses."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Doctor = Callable[..., "DoctorRun"]
Answer = Callable[[str, str], tuple[int, Any]]
"""Takes a method and a path; returns a status and a body: a JSON object, or text for a web page."""


class DoctorRun:
    """Exit code and report of one run. ``run["database"]`` holds the findings of a check as text."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        lines = [json.loads(line) for line in out.splitlines()]
        self.records: list[dict[str, str]] = [each for each in lines if "check" in each]
        self.counts: dict[str, Any] = next((each for each in lines if "done" in each), {})

    def __getitem__(self, check: str) -> str:
        return "\n".join(f"{each['result']}: {each['message']}" for each in self.records if each["check"] == check)

    @property
    def results(self) -> dict[str, str]:
        return {each["check"]: each["result"] for each in self.records}


@contextmanager
def http_server(answer: Answer) -> Iterator[str]:
    """Run a server until the end of the context, and yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            status, body = answer(self.command, self.path)
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "text/html" if isinstance(body, str) else "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = answer  # noqa: N815 - the names that the base class calls

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
