"""Restarts, the end of all processes, and the guard, with real processes in place of the children."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from service.local.errors import LocalError
from service.local.layout import Layout, layout_of, make_directories
from service.local.processes import child_environment, end_everything, kill_child, marked_processes
from service.local.supervisor import Child, Supervisor

pytestmark = pytest.mark.slow

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")
# Starts a child in another session and ignores SIGTERM, as an engine might.
STUBBORN = (
    sys.executable,
    "-c",
    """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
""",
)
SUPERVISOR = """
import subprocess, sys, time
from pathlib import Path
from service.local.layout import layout_of, take_lock
from service.local.stack import guard_child
from service.local.supervisor import Supervisor
layout = layout_of(Path(sys.argv[1]))
supervisor = Supervisor(print)
supervisor.start(guard_child(layout, take_lock(layout.lock)))
print("guarded", flush=True)
time.sleep(600)
"""


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = layout_of(tmp_path / "data")
    make_directories(layout)
    return layout


@pytest.fixture
def supervisor(layout: Layout) -> Iterator[Supervisor]:
    supervisor = Supervisor(print)
    yield supervisor
    end_everything(layout)
    supervisor.reap()


def _child(layout: Layout, name: str, command: tuple[str, ...]) -> Child:
    environment = child_environment(layout, name, os.environ, offline=True, gpu=False)
    return Child(name=name, command=command, environment=environment, log=layout.log(name))


def _eventually(condition: Callable[[], object], *, timeout_s: float = 20) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "this did not happen in time"
        time.sleep(0.05)


def test_dead_child_is_restarted(layout: Layout, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]) -> None:
    stopping = threading.Event()
    supervisor.start(_child(layout, "api", SLEEP))
    first = marked_processes(layout.local_id)[0]
    runner = threading.Thread(target=supervisor.run, args=[stopping])
    runner.start()
    first.kill()
    _eventually(lambda: {process.pid for process in marked_processes(layout.local_id)} - {first.pid})
    stopping.set()
    runner.join()
    assert "api was killed by signal 9" in capsys.readouterr().out


def test_child_that_ends_during_the_start_is_reported_with_the_end_of_its_log(
    layout: Layout, supervisor: Supervisor
) -> None:
    supervisor.start(_child(layout, "api", (sys.executable, "-c", "raise SystemExit('no such setting')")))
    with pytest.raises(LocalError, match=r"(?s)exit code 1.*no such setting"):
        supervisor.wait_until(lambda: False, what="the service", timeout_s=20, stopping=threading.Event())


def test_descendants_that_ignore_sigterm_are_killed(layout: Layout, supervisor: Supervisor) -> None:
    supervisor.start(_child(layout, "ray", STUBBORN))
    _eventually(lambda: len(marked_processes(layout.local_id)) == 2)
    assert end_everything(layout) == 2
    assert marked_processes(layout.local_id) == []
    assert not layout.runtime_dir.exists()


def test_killing_one_child_leaves_the_others_running(layout: Layout, supervisor: Supervisor) -> None:
    supervisor.start(_child(layout, "ray", STUBBORN))
    supervisor.start(_child(layout, "api", SLEEP))
    _eventually(lambda: len(marked_processes(layout.local_id)) == 3)
    kill_child(layout.local_id, "ray")
    assert [process.environ()["CLOISTER_LOCAL_CHILD"] for process in marked_processes(layout.local_id)] == ["api"]


def test_guard_ends_everything_when_the_supervisor_is_killed(layout: Layout, supervisor: Supervisor) -> None:
    guarded = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(layout.data_dir)], stdout=subprocess.PIPE, text=True
    )
    assert guarded.stdout is not None
    assert guarded.stdout.readline() == "guarded\n"
    guard = psutil.Process(guarded.pid).children()[0]
    supervisor.start(_child(layout, "ray", STUBBORN))
    _eventually(lambda: len(marked_processes(layout.local_id)) == 2)
    guarded.send_signal(signal.SIGKILL)
    guarded.communicate()
    _eventually(lambda: not guard.is_running() or guard.status() == psutil.STATUS_ZOMBIE)
    assert marked_processes(layout.local_id) == []
    assert not layout.runtime_dir.exists()
