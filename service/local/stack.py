"""Starts the whole stack in order, keeps it running, and stops it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import FrameType

import httpx

from ray_job.contract.job_spec import Accelerator
from service.api_keys import Scope, authenticate, create_api_key
from service.db import open_pool
from service.local import postgres, ray_head
from service.local.client_env import Client, first_steps, read_client_env, write_client_env
from service.local.environment import child_environment, service_environment
from service.local.errors import LocalError
from service.local.layout import Layout, layout_of, make_directories
from service.local.lock import take_lock
from service.local.models import (
    ModelOptions,
    all_local,
    catalogue,
    detect_accelerator,
    read_models,
    write_catalogue,
)
from service.local.processes import end_everything, kill_child
from service.local.supervisor import Child, Supervisor
from service.projects import ensure_default_project

POSTGRES_TIMEOUT_S = 60.0
RAY_TIMEOUT_S = 120.0
API_TIMEOUT_S = 60.0
GUARD_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that is decided before the first child starts."""

    layout: Layout
    port: int
    ray_port: int
    models_file: Path
    model_id: str
    offline: bool
    accelerator: Accelerator

    def environment(self, child: str, settings: Mapping[str, str]) -> dict[str, str]:
        """The environment of one child."""
        gpu = self.accelerator != "cpu"
        return child_environment(self.layout, child, os.environ, offline=self.offline, gpu=gpu) | dict(settings)


def check_port(port: int) -> None:
    """Raises LocalError when something listens on the port already."""
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind(("127.0.0.1", port))
        except OSError as error:
            raise LocalError(f"port {port} cannot be used ({error.strerror}): choose another with --port") from error


def _make_demo_model(layout: Layout, tell: Callable[[str], None]) -> ModelOptions:
    directory = layout.data_dir / "demo-model"
    if not (directory / "config.json").exists():
        tell("no --model is given: making a small demo model with random weights")
    command = [sys.executable, "-m", "ray_job.demo_model", str(directory)]
    environment = child_environment(layout, "demo-model", os.environ, offline=True, gpu=False)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LocalError(f"the demo model could not be made:\n{done.stderr[-2000:]}")
    return ModelOptions(source=str(directory), model_id="demo")


def make_plan(layout: Layout, *, port: int, options: ModelOptions, tell: Callable[[str], None]) -> Plan:
    """Decides on ports and models, and writes the model catalogue unless the user keeps one."""
    accelerator = detect_accelerator()
    models_file = options.models_file.resolve() if options.models_file else layout.models_file
    if options.models_file is None and (options.source or not models_file.exists()):
        if not options.source:
            made = _make_demo_model(layout, tell)
            options = ModelOptions(
                source=made.source, model_id=options.model_id or made.model_id, engine_args=options.engine_args
            )
        write_catalogue(models_file, catalogue(options, accelerator))
    models = read_models(models_file)
    return Plan(
        layout=layout,
        port=port,
        ray_port=ray_head.free_ports(1)[0],
        models_file=models_file,
        model_id=str(models[0].get("id", "")),
        offline=all_local(models),
        accelerator=accelerator,
    )


def _guard(layout: Layout, lock: int) -> Child:
    return Child(
        name="guard",
        command=[sys.executable, "-m", "service.local.guard", str(layout.data_dir)],
        environment=os.environ,  # without the mark: it would find itself
        log=layout.log("guard"),
        pass_fds=(lock,),
        watches_us=True,
    )


def _python_child(plan: Plan, name: str, module: str) -> Child:
    settings = service_environment(plan.layout, models_file=plan.models_file, port=plan.port, ray_port=plan.ray_port)
    return Child(
        name=name,
        command=[sys.executable, "-m", module],
        environment=plan.environment(name, settings),
        log=plan.layout.log(name),
        before_restart=lambda: kill_child(plan.layout.local_id, name),
    )


def _clear_ray(layout: Layout) -> None:
    """What is left of a Ray whose head died: its engines hold memory, its session spilled objects."""
    kill_child(layout.local_id, "ray")
    shutil.rmtree(layout.ray_dir, ignore_errors=True)
    layout.ray_dir.mkdir(mode=0o700, exist_ok=True)


def _ray_child(plan: Plan) -> Child:
    return Child(
        name="ray",
        command=ray_head.command(plan.layout, dashboard_port=plan.ray_port),
        environment=plan.environment("ray", {}),
        log=plan.layout.log("ray"),
        before_restart=lambda: _clear_ray(plan.layout),
    )


def _postgres_child(plan: Plan) -> Child:
    environment = plan.environment("postgres", {})
    return Child(
        name="postgres",
        command=postgres.prepare(plan.layout, environment),
        environment=environment,
        log=plan.layout.log("postgres"),
    )


def _client(plan: Plan) -> Client:
    """The base URL and an API key: the one of the last run while the database still knows it."""
    base_url = f"http://127.0.0.1:{plan.port}/v1"
    known = read_client_env(plan.layout.client_env)
    with open_pool(plan.layout.database_url(postgres.OWNER), max_size=1) as pool:
        if known is not None and authenticate(pool, known.api_key) is not None:
            key = known.api_key
        else:
            project = ensure_default_project(pool)
            key = create_api_key(pool, project_id=project.id, name="cloister local", scopes=Scope)
    client = Client(base_url=base_url, api_key=key)
    write_client_env(plan.layout.client_env, client)
    return client


def _api_answers(client: Client) -> bool:
    try:
        answer = httpx.get(
            f"{client.base_url}/models",
            headers={"Authorization": f"Bearer {client.api_key}"},
            timeout=2,
            trust_env=False,
        )
    except httpx.HTTPError:
        return False
    return answer.status_code == httpx.codes.OK


def _start(plan: Plan, supervisor: Supervisor, stopping: Event, tell: Callable[[str], None]) -> Client | None:
    """Starts all children; None when the user stopped meanwhile."""
    began_s = time.monotonic()

    def wait_for(what: str, ready: Callable[[], bool], timeout_s: float) -> bool:
        if not supervisor.wait_until(ready, what=what, timeout_s=timeout_s, stopping=stopping):
            return False
        tell(f"{what} is ready ({time.monotonic() - began_s:.1f} s)")
        return True

    tell("starting Postgres and Ray")
    ray_head.make_token(plan.layout)
    supervisor.start(_ray_child(plan))
    supervisor.start(_postgres_child(plan))
    if not wait_for("Postgres", lambda: postgres.answers(plan.layout), POSTGRES_TIMEOUT_S):
        return None
    postgres.set_up(plan.layout)
    client = _client(plan)
    tell("starting the service and the reconciler")
    supervisor.start(_python_child(plan, "api", "service.api"))
    supervisor.start(_python_child(plan, "reconciler", "service.reconciler"))
    if not wait_for("the service", lambda: _api_answers(client), API_TIMEOUT_S):
        return None
    if not wait_for("Ray", lambda: ray_head.answers(plan.layout, plan.ray_port), RAY_TIMEOUT_S):
        return None
    return client


def _stop_on_signals(stopping: Event) -> None:
    def stop(_number: int, _frame: FrameType | None) -> None:
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)


def run_local(*, port: int, data_dir: Path, options: ModelOptions, tell: Callable[[str], None]) -> None:
    """Runs the stack in the foreground until Ctrl-C or SIGTERM.

    Raises:
        LocalError: it cannot start; nothing is left running then.
    """
    stopping = Event()
    _stop_on_signals(stopping)
    layout = layout_of(data_dir)
    layout.data_dir.mkdir(parents=True, exist_ok=True)
    lock = take_lock(layout.lock)
    if leftovers := end_everything(layout):
        tell(f"ended {leftovers} processes that an earlier run left behind")
    check_port(port)
    make_directories(layout)
    supervisor = Supervisor(tell)
    supervisor.start(_guard(layout, lock))
    try:
        plan = make_plan(layout, port=port, options=options, tell=tell)
        client = _start(plan, supervisor, stopping, tell)
        if client is not None:
            tell(first_steps(client, layout.client_env, plan.model_id))
            supervisor.run(stopping)
        tell("stopping")
    finally:
        end_everything(layout)
        supervisor.reap()
        supervisor.let_go("guard", timeout_s=GUARD_TIMEOUT_S)
        os.close(lock)
    tell("stopped")
