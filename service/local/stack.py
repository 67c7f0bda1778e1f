"""Starts the whole stack in order, keeps it running, and stops it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

import httpx
import yaml

from ray_job.contract.accelerators import CPU, Accelerator
from service.api_keys import authenticate, create_api_key
from service.db import open_pool
from service.local import postgres, ray_head
from service.local.client_env import FIRST_STEPS, Client, read_client_env, write_client_env
from service.local.errors import LocalError
from service.local.keys import make_keys
from service.local.layout import Layout, layout_of, make_data_directory, make_directories, take_lock, write_private_file
from service.local.models import (
    ModelOptions,
    catalogue,
    detect_accelerator,
    read_models,
)
from service.local.processes import child_environment, end_everything, kill_child
from service.local.supervisor import Child, Supervisor
from service.projects import ensure_default_project
from service.scopes import Scope

POSTGRES_TIMEOUT_S = 60.0
RAY_TIMEOUT_S = 120.0
SERVICE_TIMEOUT_S = 60.0
GUARD_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is decided before the first child starts.

    Attributes:
        layout: the paths of the data directory.
        port: the port of the API.
        ray_port: the port of Ray's Jobs API.
        coordinator_port: the port of the coordinator.
        models_file: the model catalogue.
        model_id: the first model of the catalogue.
        offline: whether all models are on this machine or behind an endpoint, so that nothing is downloaded.
        accelerator: what engines run on.
    """

    layout: Layout
    port: int
    ray_port: int
    coordinator_port: int
    models_file: Path
    model_id: str
    offline: bool
    accelerator: Accelerator

    def child(
        self,
        name: str,
        command: list[str],
        *,
        settings: Mapping[str, str] | None = None,
        before_restart: Callable[[], None] | None = None,
    ) -> Child:
        """Return a child with the environment of this plan."""
        gpu = self.accelerator is not CPU
        environment = child_environment(self.layout, name, os.environ, offline=self.offline, gpu=gpu)
        return Child(
            name=name,
            command=command,
            environment=environment | dict(settings or {}),
            log=self.layout.log(name),
            before_restart=before_restart,
        )

    def service_child(self, name: str) -> Child:
        """Return the child that runs the module ``service.<name>``."""
        settings = {
            "CLOISTER_DATABASE_URL": self.layout.database_url(postgres.SERVICE),
            "CLOISTER_OBJECT_STORE": self.layout.objects.as_uri(),
            "CLOISTER_MODELS": str(self.models_file),
            "CLOISTER_ENCRYPTION_KEYS_FILE": str(self.layout.encryption_keys),
            "CLOISTER_RECEIPT_KEY_FILE": str(self.layout.receipt_key),
            "CLOISTER_HOST": "127.0.0.1",
            "CLOISTER_PORT": str(self.port),
            "CLOISTER_RAY_ADDRESS": f"http://127.0.0.1:{self.ray_port}",
            "CLOISTER_COORDINATOR_PORT": str(self.coordinator_port),
            "CLOISTER_COORDINATOR_URL": f"http://127.0.0.1:{self.coordinator_port}",
            # This machine's own receivers; the caller can name others.
            "CLOISTER_WEBHOOK_NETWORKS": os.environ.get("CLOISTER_WEBHOOK_NETWORKS") or "127.0.0.0/8,::1/128",
        }
        return self.child(
            name,
            [sys.executable, "-m", f"service.{name}"],
            settings=settings,
            before_restart=lambda: kill_child(self.layout.local_id, name),
        )

    def ray_child(self) -> Child:
        """Return the child that runs Ray's head node."""

        def remove_leftovers() -> None:
            # After the death of its head, a Ray leaves engines that hold memory, and spilled objects of its session.
            kill_child(self.layout.local_id, "ray")
            for directory in (self.layout.ray_dir, self.layout.ray_spill_dir):
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir(mode=0o700, exist_ok=True)

        command = ray_head.command(self.layout, dashboard_port=self.ray_port)
        return self.child("ray", command, before_restart=remove_leftovers)

    def postgres_child(self) -> Child:
        """Return the child that runs Postgres; its data directory is created if it is missing."""
        command = postgres.prepare(self.layout, self.child("postgres", []).environment)
        return self.child("postgres", command)


def make_plan(layout: Layout, *, port: int, options: ModelOptions, report: Callable[[str], None]) -> Plan:
    """Choose ports and models, and write the model catalogue unless the user maintains it.

    Raises:
        LocalError: the demo model cannot be created, or the catalogue is invalid.
    """
    accelerator = detect_accelerator()
    models_file = options.models_file.resolve() if options.models_file else layout.models_file
    if options.models_file is None and (options.source or not models_file.exists()):
        if not options.source:
            directory = layout.data_dir / "demo-model"
            if not (directory / "config.json").exists():
                report("no --model is set: creating a small demo model with random weights")
            done = subprocess.run(
                [sys.executable, "-m", "ray_job.demo_model", str(directory)],
                env=child_environment(layout, "demo-model", os.environ, offline=True, gpu=False),
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                raise LocalError(f"the demo model could not be created:\n{done.stderr[-2000:]}")
            options = replace(options, source=str(directory), model_id=options.model_id or "demo")
        content = yaml.safe_dump(catalogue(options, accelerator), sort_keys=False, allow_unicode=True)
        write_private_file(models_file, content)
    models = read_models(models_file)
    ray_port, coordinator_port = ray_head.free_ports(2)
    return Plan(
        layout=layout,
        port=port,
        ray_port=ray_port,
        coordinator_port=coordinator_port,
        models_file=models_file,
        model_id=str(models[0].get("id", "")),
        offline=all(each.get("engine") == "http" or Path(str(each.get("source", ""))).is_dir() for each in models),
        accelerator=accelerator,
    )


def make_client(plan: Plan) -> Client:
    """Return the base URL and an API key, and write them to ``client.env``.

    The key of the last run is used as long as the database accepts it.
    """
    known = read_client_env(plan.layout.client_env)
    with open_pool(plan.layout.database_url(postgres.SERVICE), max_size=1) as pool:
        if known is not None and authenticate(pool, known.api_key) is not None:
            key = known.api_key
        else:
            project = ensure_default_project(pool)
            key = create_api_key(pool, project_id=project.id, name="cloister local", scopes=Scope)
    client = Client(base_url=f"http://127.0.0.1:{plan.port}/v1", api_key=key)
    write_client_env(plan.layout.client_env, client)
    return client


def start(plan: Plan, supervisor: Supervisor, stopping: Event, report: Callable[[str], None]) -> Client | None:
    """Start all children; return None if the user stopped it first.

    Raises:
        LocalError: a child ended, or was not ready in time.
    """
    began_s = time.monotonic()

    def wait_for(what: str, ready: Callable[[], bool], timeout_s: float) -> bool:
        if not supervisor.wait_until(ready, what=what, timeout_s=timeout_s, stopping=stopping):
            return False
        report(f"{what} is ready ({time.monotonic() - began_s:.1f} s)")
        return True

    def service_answers() -> bool:
        headers = {"Authorization": f"Bearer {client.api_key}"}
        ready = f"http://127.0.0.1:{plan.coordinator_port}/readyz"
        try:
            models = httpx.get(f"{client.base_url}/models", headers=headers, timeout=2, trust_env=False)
            coordinator = httpx.get(ready, timeout=2, trust_env=False)
        except httpx.HTTPError:
            return False
        return models.status_code == coordinator.status_code == httpx.codes.OK

    report("starting Postgres and Ray")
    ray_head.make_token(plan.layout)
    make_keys(plan.layout)
    supervisor.start(plan.ray_child())
    supervisor.start(plan.postgres_child())
    if not wait_for("Postgres", lambda: postgres.answers(plan.layout), POSTGRES_TIMEOUT_S):
        return None
    postgres.set_up(plan.layout)
    client = make_client(plan)
    report("starting API, reconciler and coordinator")
    for name in ("api", "reconciler", "coordinator"):
        supervisor.start(plan.service_child(name))
    if not wait_for("the service", service_answers, SERVICE_TIMEOUT_S):
        return None
    if not wait_for("Ray", lambda: ray_head.answers(plan.layout, plan.ray_port), RAY_TIMEOUT_S):
        return None
    return client


def guard_child(layout: Layout, lock: int) -> Child:
    """Return the child that ends all others if this process dies. It shares the lock."""
    return Child(
        name="guard",
        command=[sys.executable, "-m", "service.local.guard", str(layout.data_dir)],
        environment=os.environ,  # without the mark, or it would end itself
        log=layout.log("guard"),
        pass_fds=(lock,),
        watches_us=True,
    )


def run_local(*, port: int, data_dir: Path, options: ModelOptions, report: Callable[[str], None]) -> None:
    """Run the stack in the foreground until Ctrl-C or SIGTERM.

    Args:
        port: the port of the API, on 127.0.0.1.
        data_dir: the data directory; created if it is missing.
        options: the model options of the command line.
        report: prints a message for the user.

    Raises:
        LocalError: the stack cannot start; no process is left running.
    """
    stopping = Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stopping.set())
    layout = layout_of(data_dir)
    make_data_directory(layout)
    lock = take_lock(layout.lock)
    if leftovers := end_everything(layout):
        report(f"ended {leftovers} processes of an earlier run")
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind(("127.0.0.1", port))
        except OSError as error:
            raise LocalError(f"port {port} cannot be used ({error.strerror}): choose another with --port") from error
    # The directories of an earlier run are gone.
    layout = layout_of(data_dir)
    make_directories(layout)
    supervisor = Supervisor(report)
    supervisor.start(guard_child(layout, lock))
    try:
        plan = make_plan(layout, port=port, options=options, report=report)
        client = start(plan, supervisor, stopping, report)
        if client is not None:
            report(
                FIRST_STEPS.format(
                    base_url=client.base_url,
                    api_key=client.api_key,
                    model_id=plan.model_id,
                    client_env=layout.client_env,
                )
            )
            supervisor.run(stopping)
        report("stopping")
    finally:
        end_everything(layout)
        supervisor.reap()
        supervisor.close_pipe("guard", timeout_s=GUARD_TIMEOUT_S)
        os.close(lock)
    report("stopped")
