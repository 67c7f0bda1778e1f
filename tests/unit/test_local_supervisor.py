"""Restarts of dead children."""

import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from service.local.errors import LocalError
from service.local.ray_head import FREE_PORT_RANGE, free_ports
from service.local.supervisor import Child, RestartPlan, Supervisor, describe_exit


def test_child_that_lived_long_is_restarted_soon() -> None:
    plan = RestartPlan(quick_deaths=7).after_death(lived_s=600, now_s=1000)
    assert plan.quick_deaths == 1
    assert plan.start_at_s == 1000.25


def test_pause_doubles_with_each_quick_death() -> None:
    delays = [RestartPlan(quick_deaths=deaths).after_death(lived_s=1, now_s=0).start_at_s for deaths in range(5)]
    assert delays == [0.25, 0.5, 1, 2, 4]


def test_pause_has_an_upper_limit() -> None:
    assert RestartPlan(quick_deaths=50).after_death(lived_s=1, now_s=0).start_at_s == 15


def test_exit_is_described_in_words() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-9) == "was killed by signal 9"


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def supervisor(reports: list[str]) -> Iterator[Supervisor]:
    supervisor = Supervisor(reports.append)
    yield supervisor
    supervisor.close_pipe("child", timeout_s=10)


def child(directory: Path, script: str) -> Child:
    """Return a child that ends with its standard input, which ends with this process."""
    command = ["sh", "-c", f"cd {directory}; {script}"]
    return Child(name="child", command=command, environment=os.environ, log=directory / "log", watches_us=True)


def test_child_that_ends_during_the_start_is_started_again(
    supervisor: Supervisor, reports: list[str], tmp_path: Path
) -> None:
    supervisor.start(child(tmp_path, "[ -e died ] && exec tee up; touch died; exit 3"))
    up = tmp_path / "up"
    assert supervisor.wait_until(up.exists, what="the child", timeout_s=30, stopping=Event())
    assert reports == [f"child ended with exit code 3; restarting it (log: {tmp_path / 'log'})"]


def test_child_that_ends_twice_during_the_start_is_reported_with_its_log(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    supervisor.start(child(tmp_path, "echo no such model; exit 3"))
    with pytest.raises(LocalError, match=r"child ended with exit code 3\. The end of .*log:\nno such model"):
        supervisor.wait_until(lambda: False, what="the child", timeout_s=30, stopping=Event())


def test_free_ports_differ_and_are_no_ephemeral_ports() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3
    assert set(ports) <= set(FREE_PORT_RANGE)
