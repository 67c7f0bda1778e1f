"""Many live jobs and queued batches, with the real processes of the service."""

import pytest

from tests.bench.control_plane.figures import LAG_S, SERVICE_MB, quantile
from tests.bench.control_plane.run import lost_or_doubled, measure, memory_directory
from tests.bench.control_plane.stack import SERVICES, Load, running_stack

pytestmark = pytest.mark.slow


# Other tests run at the same time, so the bars of the benchmark are too low for the times of requests.
def test_service_keeps_up_under_load_and_no_line_is_lost_or_doubled() -> None:
    load = Load(live=100, queued=1_000, lines=20, rows_per_s=1.0, commit_every_s=5.0)
    with memory_directory() as directory, running_stack(load, directory) as stack:
        figures = measure(stack, load, seconds=8, settle_s=2)
        assert lost_or_doubled(stack, load) == []
    assert figures.broken == 0
    assert len(figures.completions) > 10
    assert quantile(figures.lags, 0.99) < LAG_S
    assert quantile(figures.retrievals, 0.99) < 1
    assert all(figures.memory_mb[name] < SERVICE_MB for name in SERVICES)
