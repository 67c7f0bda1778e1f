"""Counters of a simulated GPU, on the clock of the device, and their JSON file.

All times are seconds of the monotonic clock, which the processes of one machine share. If the device's clock runs
faster than real time (``clock_rate``), durations between them have to be multiplied by that factor.
"""

import dataclasses
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SAMPLE_INTERVAL_S: Final = 0.25
WRITE_INTERVAL_S: Final = 2.0


@dataclass(slots=True, kw_only=True)
class DeviceReport:
    """Counters of one device.

    Attributes:
        profile: the name of the profile.
        clock_rate: simulated seconds per second.
        engine: limits of the engine that the device works for.
        first_step_at: start of the first step.
        last_step_ends_at: end of the last step.
        busy_s: seconds of all steps.
        steps: steps with at least one token.
        running_s: scheduled requests of each step times its seconds.
        prompt_tokens: tokens of all prompts that were started.
        hit_tokens: prompt tokens that the prefix cache held when the request was started first.
        generated_tokens: tokens of all answers, each once.
        preemptions: requests that lost their KV cache and started again.
        finished_rows: requests whose last token was computed.
        progress: ``(time, finished rows, busy seconds until then)`` at each step that finished rows, and at others at
            most every ``SAMPLE_INTERVAL_S``.
    """

    profile: str
    clock_rate: float = 1.0
    engine: dict[str, int | bool] = field(default_factory=dict)
    first_step_at: float = 0.0
    last_step_ends_at: float = 0.0
    busy_s: float = 0.0
    steps: int = 0
    running_s: float = 0.0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished_rows: int = 0
    progress: list[tuple[float, int, float]] = field(default_factory=list)

    def add_step(self, *, now: float, duration_s: float, running: int, finished: int) -> float:
        """Add a step that starts when the device is free.

        Args:
            now: the time at which the step is submitted.
            duration_s: seconds of real time.
            running: requests of the step.
            finished: requests whose last token the step computes.

        Returns:
            The time at which the step ends.
        """
        starts_at = max(now, self.last_step_ends_at)
        ends_at = starts_at + duration_s
        self.first_step_at = self.first_step_at or starts_at
        self.last_step_ends_at = ends_at
        self.busy_s += duration_s
        self.running_s += running * duration_s
        self.steps += 1
        self.finished_rows += finished
        if finished or not self.progress or ends_at - self.progress[-1][0] >= SAMPLE_INTERVAL_S:
            self.progress.append((round(ends_at, 6), self.finished_rows, round(self.busy_s, 6)))
        return ends_at


class ReportFile:
    """A report's file in a directory. A new content replaces the old one at once.

    Args:
        directory: the directory; created if it is missing.
        report: the report to write.
    """

    def __init__(self, directory: Path, report: DeviceReport) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"{report.profile}-{os.getpid()}.json"
        self._report = report
        self._written_at = 0.0

    def write(self, *, idle: bool) -> None:
        """Write the report if the device is idle, or if the file is older than ``WRITE_INTERVAL_S``."""
        now = time.monotonic()
        if not idle and now - self._written_at < WRITE_INTERVAL_S:
            return
        staging = self._path.with_suffix(".staging")
        staging.write_text(json.dumps(dataclasses.asdict(self._report)))
        staging.replace(self._path)
        self._written_at = now


def read_reports(directory: Path) -> list[DeviceReport]:
    """Return the reports of all devices of a run that did any work, by the start of their work."""
    reports = [DeviceReport(**json.loads(path.read_text())) for path in sorted(directory.glob("*.json"))]
    return sorted((report for report in reports if report.steps), key=lambda report: report.first_step_at)
