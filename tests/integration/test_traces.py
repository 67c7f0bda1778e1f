"""Traces of batches, from the upload to the root span at the end, and their way to a collector."""

import gzip
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from structlog.testing import capture_logs

from service.adapters.otlp_spans import MAX_WAITING, OtlpSpans
from service.backends import spans_dropped
from service.compose import open_backends
from service.db import Pool
from service.local.ray_head import free_ports
from service.settings import read_settings
from service.traces import Traces, span_id, trace_id
from tests.integration.reconciler_harness import Stack
from tests.integration.traced_batch import Spans, traced_batch

BATCH = "batch_1"


def test_batch_has_one_trace_from_its_creation_to_its_end(pool: Pool, tmp_path: Path) -> None:
    spans = Spans()
    batch_id = traced_batch(pool, tmp_path, Traces(spans))
    [root] = [span for span in spans if span.name == "batch"]
    of_batch = [span for span in spans if span.trace_id == root.trace_id]
    assert root.trace_id == trace_id(batch_id)
    names = [span.name for span in of_batch]
    work = ["segment", "read", "queue", "engine", "write", "commit"]
    assert names == [
        "create", "validate", "plan", "wait", "launch", "start", "lease", *work, *work, "assemble", "batch"
    ]  # fmt: skip
    below = {span.span_id: span.name for span in of_batch}
    parents = {span.name: below[span.parent_id] for span in of_batch if span.parent_id is not None}
    assert parents.pop("launch") == parents.pop("start") == "wait"
    assert {parents.pop(name) for name in work[1:]} == {"segment"}
    assert set(parents.values()) == {"batch"}
    assert len(below) == len(of_batch)
    assert all(root.start <= span.start <= span.end for span in of_batch if span.name not in ["create", *work])
    assert root.attributes["cloister.state"] == "completed"
    assert (root.attributes["cloister.completed"], root.attributes["cloister.failed"]) == (1, 2)
    assert root.attributes["gen_ai.usage.input_tokens"] == 30
    [upload] = [span for span in spans if span not in of_batch]
    assert (upload.name, span_id(of_batch[0].link)) == ("upload", upload.span_id)


def test_refused_batch_ends_its_trace(stack: Stack) -> None:
    spans = Spans()
    object.__setattr__(stack.backends, "traces", Traces(spans))
    stack.create(b"{}")
    assert stack.advance()["status"] == "failed"
    assert [(span.name, span.is_error) for span in spans] == [("validate", False), ("batch", True)]
    assert spans[0].attributes["cloister.errors"] == len(stack.errors())


class _Received(BaseHTTPRequestHandler):
    requests: ClassVar[list[ExportTraceServiceRequest]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
        assert self.path == "/v1/traces"
        self.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """An address that receives OTLP, and what it has received."""

    class Handler(_Received):
        requests: ClassVar = []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", Handler.requests
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_arrive_with_their_ids_times_and_attributes(
    receiver: tuple[str, list[ExportTraceServiceRequest]],
) -> None:
    url, requests = receiver
    start, end = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC), datetime(2026, 1, 2, 3, 4, 6, tzinfo=UTC)
    dropped = spans_dropped()
    with OtlpSpans(url, process="api", dropped=dropped) as exporter:
        traces = Traces(exporter)
        traces.child(BATCH, "create", start, {"cloister.file.bytes": 7}, end=end, link="file-1")
        traces.root(BATCH, "batch", start, {"cloister.state": "failed"}, end=end, is_error=True)
    [resource] = requests[0].resource_spans
    assert ("service.name", "api") in [(each.key, each.value.string_value) for each in resource.resource.attributes]
    child, root = resource.scope_spans[0].spans
    assert child.trace_id == root.trace_id == trace_id(BATCH).to_bytes(16)
    assert (child.parent_span_id, root.parent_span_id, root.span_id) == (root.span_id, b"", span_id(BATCH).to_bytes(8))
    assert child.links[0].trace_id == trace_id("file-1").to_bytes(16)
    assert (child.start_time_unix_nano % 10**9, child.end_time_unix_nano) == (678_901_000, int(end.timestamp()) * 10**9)
    assert (child.attributes[1].key, child.attributes[1].value.int_value) == ("cloister.file.bytes", 7)
    assert (child.status.code, root.status.code) == (0, 2)
    assert dropped._value.get() == 0


def test_processes_with_a_collector_in_their_settings_send_spans(
    receiver: tuple[str, list[ExportTraceServiceRequest]], database_url: str, receipt_key_file: str, tmp_path: Path
) -> None:
    url, requests = receiver
    (tmp_path / "models.yaml").write_text("models:\n  - id: demo\n    source: /models/demo\n")
    settings = read_settings(
        {
            "CLOISTER_DATABASE_URL": database_url,
            "CLOISTER_OBJECT_STORE": f"file://{tmp_path}/objects",
            "CLOISTER_MODELS": str(tmp_path / "models.yaml"),
            "CLOISTER_RECEIPT_KEY_FILE": receipt_key_file,
            "CLOISTER_OTLP_ENDPOINT": url,
            "CLOISTER_TRACE_SEGMENTS": "1",
        }
    )
    with open_backends(settings, "reconciler") as backends:
        assert backends.traces.samples(BATCH, 17)
        backends.traces.root(BATCH, "batch", datetime.now(UTC), {})
    assert [each.scope_spans[0].spans[0].name for each in requests[0].resource_spans] == ["batch"]


def test_collector_that_is_away_costs_spans_and_no_time() -> None:
    dropped = spans_dropped()
    with socket.socket() as silent, capture_logs() as logs:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with OtlpSpans(url, process="api", dropped=dropped, timeout_s=0.2, interval_s=0.05) as exporter:
            traces, began_s = Traces(exporter), time.monotonic()
            for number in range(MAX_WAITING + 100):
                traces.child(BATCH, "plan", datetime.now(UTC), {"cloister.segments": number})
            took_s = time.monotonic() - began_s
            assert dropped._value.get() >= 100
    assert took_s < 5
    assert dropped._value.get() == MAX_WAITING + 100
    assert [each["event"] for each in logs] == ["traces.lost"]


def test_reason_of_an_outage_is_logged_once() -> None:
    [port] = free_ports(1)
    with capture_logs() as logs:
        url = f"http://127.0.0.1:{port}"
        with OtlpSpans(url, process="api", dropped=spans_dropped(), timeout_s=1.5, interval_s=0.01) as exporter:
            for _ in range(3):
                Traces(exporter).root(BATCH, "batch", datetime.now(UTC), {})
    [lost] = logs
    assert (lost["endpoint"], lost["log_level"]) == (url, "warning")
    assert "Connection refused" in lost["reason"]


def test_end_of_an_outage_is_logged(receiver: tuple[str, list[ExportTraceServiceRequest]]) -> None:
    url, requests = receiver
    with capture_logs() as logs, OtlpSpans(url, process="api", dropped=spans_dropped()) as exporter:
        exporter._sender._lose(3, "refused")
        Traces(exporter).root(BATCH, "batch", datetime.now(UTC), {})
        exporter._provider.force_flush()
    assert len(requests) == 1
    assert [(each["event"], each.get("lost_spans")) for each in logs] == [
        ("traces.lost", None),
        ("traces.sent_again", 3),
    ]
