"""Traces in an OpenTelemetry Collector."""

import re
from pathlib import Path

import pytest

from service.adapters.otlp_spans import OtlpSpans
from service.backends import spans_dropped
from service.db import Pool
from service.local.ray_head import free_ports
from service.traces import Traces, span_id, trace_id
from tests.cluster.ports import LOOPBACK
from tests.cluster.processes import Process
from tests.integration.traced_batch import CANARY, traced_batch

pytestmark = pytest.mark.cluster

CONFIGURATION = """
receivers:
  otlp:
    protocols:
      http:
        endpoint: {address}
exporters:
  debug:
    verbosity: detailed
service:
  pipelines:
    traces:
      receivers: [otlp]
      exporters: [debug]
  telemetry:
    metrics:
      level: none
"""


def test_collector_receives_the_trace_of_a_batch_without_content(pool: Pool, tmp_path: Path, programs: Path) -> None:
    [port] = free_ports(1)
    configuration, log = tmp_path / "otelcol.yaml", tmp_path / "otelcol.log"
    configuration.write_text(CONFIGURATION.format(address=f"{LOOPBACK}:{port}"))
    command = [str(programs / "bin" / "otelcol"), "--config", f"file:{configuration}"]
    dropped = spans_dropped()
    with (
        Process(command, log=log, is_ready=lambda: "Everything is ready" in log.read_text()),
        OtlpSpans(f"http://{LOOPBACK}:{port}", process="test", dropped=dropped) as exporter,
    ):
        batch_id = traced_batch(pool, tmp_path, Traces(exporter))
    printed = log.read_text()
    found = re.findall(r"Trace ID +: (\w+)\n +Parent ID +: (\w*)\n +ID +: (\w+)\n +Name +: (\w+)", printed)
    of_batch = [(parent, own, name) for trace, parent, own, name in found if trace == f"{trace_id(batch_id):032x}"]
    root = f"{span_id(batch_id):016x}"
    assert ("", root, "batch") in of_batch
    assert {name for parent, _, name in of_batch if parent == root} == {
        "create", "validate", "plan", "wait", "lease", "segment", "assemble"
    }  # fmt: skip
    assert f"cloister.batch.id: Str({batch_id})" in printed
    assert CANARY.lower() not in printed.lower()
    assert dropped._value.get() == 0
