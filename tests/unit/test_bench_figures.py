from pathlib import Path

import pytest

from tests.bench.bars import BARS, Measured, starved
from tests.bench.cases import FULL, SELECTION
from tests.bench.figures import DeviceFigures, between, block_hits, device_figures, spread
from tests.bench.measure import Result
from tests.bench.report import SIMULATED_COLUMNS, chart, markdown, table
from tests.bench.simulated_gpu.device_report import DeviceReport, ReportFile, read_reports


def device(*steps: tuple[float, int], starts_at: float = 100.0) -> DeviceReport:
    """A device whose steps, each of a second, are submitted at these times and finish so many rows."""
    report = DeviceReport(profile="h100-8b")
    for at, finished in steps:
        report.add_step(now=starts_at + at, duration_s=1.0, running=4, finished=finished)
    return report


def result(
    runner: str, case: str = "lognormal-h100", *, rate: float = 10.0, total_s: float = 60.0, busy_share: float = 1.0
) -> Result:
    figures = DeviceFigures(
        reports=1,
        finished_rows=100,
        seconds=100 / rate,
        rows_per_s=rate,
        rows_per_busy_s=rate,
        tokens_per_s=1.0,
        running=1.0,
        busy_share=busy_share,
        busy_share_95=1.0,
        hit_rate=0.5,
        prompt_tokens=1,
        generated_tokens=1,
        preemptions=0,
    )
    return Result(
        runner=runner,
        run=1,
        case=case,
        lines=100,
        total_s=total_s,
        first_row_s=1,
        rows_per_s=1,
        peak_mb=1,
        device=figures,
    )


def measured(*results: Result) -> Measured:
    return Measured(results=results, best_hit_rates={}, asked_tokens={})


def test_step_waits_for_the_step_before() -> None:
    report = device((0, 0), (0.5, 0), (5, 1))
    assert (report.last_step_ends_at, report.busy_s) == (106, 3)


def test_rate_counts_idle_time_and_tail() -> None:
    figures = device_figures([device((0, 1), (1, 1), (3, 2))])
    assert (figures.seconds, figures.rows_per_s, figures.rows_per_busy_s) == (4, 1, pytest.approx(4 / 3))
    assert figures.busy_share == 0.75


def test_faster_clock_is_converted_to_seconds_of_the_device() -> None:
    report = device((0, 4))
    report.clock_rate = 8
    assert device_figures([report]).rows_per_s == 0.5


def test_devices_are_added_over_the_time_of_all() -> None:
    figures = device_figures([device((0, 2), (1, 2)), device((2, 4), (3, 0))], engines=2)
    assert (figures.reports, figures.finished_rows, figures.seconds, figures.busy_share) == (2, 8, 4, 0.5)


def test_engine_without_work_is_idle() -> None:
    assert device_figures([device((0, 1), (1, 1))], engines=4).busy_share == 0.25


def test_restarted_engine_is_one_engine() -> None:
    assert device_figures([device((0, 1)), device((1, 1))]).busy_share == 1


def test_tail_does_not_count_for_95_percent() -> None:
    figures = device_figures([device((0, 50), (1, 50), (10, 0))])
    assert figures.busy_share_95 == pytest.approx(1)
    assert figures.busy_share == pytest.approx(3 / 11)


def test_growth_between_two_times_is_interpolated() -> None:
    samples = [(0.5, 0.0), (2.0, 3.0), (4.0, 4.0)]
    assert between(samples, 1.0, 3.0) == 2.5
    assert between(samples, 2.0, 9.0) == 1.0


def test_spread_shows_the_range_of_runs_that_differ() -> None:
    assert spread([3, 1, 2]).text() == "2.0 (1.0 to 3.0)"
    assert spread([2, 2]).text() == "2.0"


def test_best_order_computes_each_block_once() -> None:
    prefix = list(range(32))
    assert block_hits([[*prefix, 91], [*prefix, 92]], block_size=16) == pytest.approx(32 / 66)
    assert block_hits([prefix, prefix], block_size=16) == pytest.approx(16 / 64)
    assert block_hits([prefix, prefix[16:]], block_size=16) == 0


def test_report_is_replaced_and_read_back(tmp_path: Path) -> None:
    report = device((0, 1))
    file = ReportFile(tmp_path / "reports", report)
    file.write(idle=False)
    report.add_step(now=200, duration_s=1, running=1, finished=1)
    file.write(idle=False)
    assert [each.finished_rows for each in read_reports(tmp_path / "reports")] == [1]
    file.write(idle=True)
    assert [each.finished_rows for each in read_reports(tmp_path / "reports")] == [2]


def test_devices_without_work_are_left_out(tmp_path: Path) -> None:
    ReportFile(tmp_path, DeviceReport(profile="h100-8b")).write(idle=True)
    assert read_reports(tmp_path) == []


@pytest.mark.parametrize(("rate", "word"), [(9.8, "pass"), (9.6, "fail")])
def test_bar_divides_the_runner_by_the_limit(rate: float, word: str) -> None:
    passed, line = BARS[0].verdict(measured(result("limit"), result("cloister", rate=rate)))
    assert passed == (word == "pass")
    assert line.startswith(word)


@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.name)
def test_bar_without_measurement_fails(bar: object) -> None:
    passed, line = bar.verdict(measured())  # type: ignore[attr-defined]
    assert not passed
    assert "not measured" in line


@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.name)
def test_bar_needs_cases_that_exist(bar: object) -> None:
    assert set(bar.cases) <= set(FULL)  # type: ignore[attr-defined]


def test_device_that_waits_for_the_processors_is_reported() -> None:
    assert starved([result("limit"), result("cloister", busy_share=0.5)]) == []
    assert "69 %" in starved([result("limit", busy_share=0.69)])[0]


def test_selection_is_part_of_all_cases() -> None:
    assert set(SELECTION) <= set(FULL)


def test_tables_of_simulated_devices_are_headed_so() -> None:
    text = markdown([result("limit"), result("cloister")], machine="2 cores")
    assert "### Simulated GPU (2 cores" in text
    assert "Demo model" not in text


def test_table_has_a_line_for_each_runner() -> None:
    lines = table([result("limit"), result("limit", rate=20), result("cloister")], SIMULATED_COLUMNS).splitlines()
    assert len(lines) == 4
    assert "| lognormal-h100 | limit | 100 | 2 | 15.0 (10.0 to 20.0) |" in lines[2]


def test_chart_names_every_runner() -> None:
    picture = chart([result("limit"), result("cloister")])
    assert picture.startswith("<svg")
    assert "Simulated GPU" in picture
    assert all(f">{runner}<" in picture for runner in ("limit", "cloister"))
    assert "10.0 of 10.0" in picture
