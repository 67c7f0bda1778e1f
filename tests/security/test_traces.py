"""Traces leave the stack, so they hold no content, and a job cannot put what it likes into them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import get_args

from ray_job.contract.leases import Commit, SegmentTimes
from service.coordinator.commits import commit
from service.db import Pool
from service.traces import Attribute, Traces
from tests.integration.coordinator_harness import Coordinated, committed
from tests.integration.traced_batch import CANARY, Spans, traced_batch


def test_content_names_and_metadata_are_in_no_span(pool: Pool, tmp_path: Path) -> None:
    spans = Spans()
    traced_batch(pool, tmp_path, Traces(spans, segments=1))
    assert len(spans) > 10
    assert CANARY.lower() not in repr(spans).lower()
    assert {name for span in spans for name in span.attributes} <= set(get_args(Attribute))


def test_file_id_that_a_client_made_up_is_in_no_span(pool: Pool, tmp_path: Path) -> None:
    spans = Spans()
    traced_batch(pool, tmp_path, Traces(spans), input_file_id=CANARY)
    assert [span.name for span in spans if span.name == "batch"]
    assert CANARY.lower() not in repr(spans).lower()


def test_times_that_a_job_made_up_are_bounded(pool: Pool) -> None:
    stack, spans, now = Coordinated(pool), Spans(), datetime.now(UTC)
    stack.add()
    job = stack.start_job()
    [lease, *_] = job.lease()
    times = SegmentTimes(segment=lease.segment, leased_s=1e300, read_s=0.0, sent_s=5.0, ready_s=1e18)
    unknown = SegmentTimes(segment=2**62, leased_s=1.0, read_s=1.0, sent_s=1.0, ready_s=1.0)
    message = Commit(
        batch_id=lease.batch_id, key=job.part_key(lease.batch_id), segments=(committed(lease),), times=(times, unknown)
    )
    assert commit(pool, job.id, message, Traces(spans)).accepted == (True,)
    assert {span.name for span in spans} == {"segment", "read", "commit"}
    assert all(now - timedelta(days=31) < span.start <= span.end for span in spans)
