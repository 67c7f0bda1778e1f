"""The processes of a load test: Postgres, API, reconciler and coordinator as in ``cloister local``, and the jobs."""

import contextlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any, Final

import httpx
import openai
import psutil
import psycopg
import yaml

from ray_job.contract.accelerators import CPU
from ray_job.contract.job_spec import Sharing
from ray_job.contract.object_keys import plan_key
from service.api_keys import create_api_key
from service.db import open_pool
from service.local import postgres, ray_head
from service.local.keys import make_keys
from service.local.layout import Layout, layout_of, make_directories, write_private_file
from service.local.processes import end_everything, marked_processes
from service.local.stack import Plan
from service.local.supervisor import Supervisor
from service.projects import create_project

MODEL: Final = "simulated"
KEEP_WARM_S: Final = 5
START_TIMEOUT_S: Final = 120.0
SERVICES: Final = ("api", "reconciler", "coordinator")
JOBS: Final = "jobs"
POSTGRES: Final = "postgres"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of the control plane.

    Attributes:
        live: jobs that run at the same time.
        queued: batches that wait for a job.
        lines: lines of each batch.
        rows_per_s: the rate of a job of mean length.
        commit_every_s: how often a job commits.
        sharing: whose batches share a job; with ``project`` there are as many projects as live jobs.
        projects: between which the batches are divided.
    """

    live: int
    queued: int
    lines: int = 200
    rows_per_s: float = 1.0
    commit_every_s: float = 10.0
    sharing: Sharing = "batch"
    projects: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A project of the load, with the key of its client and its first batch, which all others are copies of."""

    project_id: str
    api_key: str
    file_id: str
    batch_id: str


@dataclass(slots=True, kw_only=True)
class LoadedStack:
    """A running stack.

    Attributes:
        layout: its paths.
        base_url: that of the API, ending in /v1.
        dashboard_url: where the simulated jobs report.
        database_url: Postgres.
        tenants: the projects.
        batch_ids: all batches that were added before the stack was measured.
    """

    layout: Layout
    base_url: str
    dashboard_url: str
    database_url: str
    tenants: list[Tenant] = field(default_factory=list)
    batch_ids: list[str] = field(default_factory=list)

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the processes of a child of the stack; those of Postgres are many."""
        found = marked_processes(self.layout.local_id, child=name)
        # Postgres writes titles over the environment of its processes, and with it the mark.
        return [*found, *found[0].children()] if name == POSTGRES else found

    def sql(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows, if any."""
        with psycopg.connect(self.database_url) as connection:
            cursor = connection.execute(statement, values)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []


@contextlib.contextmanager
def running_stack(load: Load, directory: Path) -> Iterator[LoadedStack]:
    """Run the stack with its simulated jobs in a new directory until the block ends.

    Args:
        load: what it has to carry.
        directory: for all files; a part of it is the path of a Unix socket, so it has to be short.

    Raises:
        LocalError: a process did not start.
    """
    layout = layout_of(directory / "data", runtime_root=directory)
    make_directories(layout)
    # The launcher sends it; nothing checks it.
    ray_head.make_token(layout)
    make_keys(layout)
    write_private_file(layout.models_file, yaml.safe_dump({"models": [_model(load)]}))
    port, ray_port, coordinator_port = ray_head.free_ports(3)
    plan = Plan(
        layout=layout,
        port=port,
        ray_port=ray_port,
        coordinator_port=coordinator_port,
        models_file=layout.models_file,
        model_id=MODEL,
        offline=True,
        accelerator=CPU,
    )
    stack = LoadedStack(
        layout=layout,
        base_url=f"http://127.0.0.1:{port}/v1",
        dashboard_url=f"http://127.0.0.1:{ray_port}",
        database_url=layout.database_url(postgres.SERVICE),
    )
    supervisor = Supervisor(print)
    try:
        with _raising_on_sigterm():
            supervisor.start(plan.postgres_child())
            _wait(supervisor, "Postgres", lambda: postgres.answers(layout))
            postgres.set_up(layout)
            simulated = ["-m", "tests.bench.control_plane.jobs", "--port", str(ray_port)]
            simulated += ["--rows-per-s", str(load.rows_per_s), "--commit-every-s", str(load.commit_every_s)]
            supervisor.start(plan.child(JOBS, [sys.executable, *simulated]))
            for name in SERVICES:
                child = plan.service_child(name)
                settings = {"CLOISTER_MAX_RUNNING_JOBS": str(load.live), "CLOISTER_LOG_LEVEL": "info"}
                supervisor.start(plan.child(name, list(child.command), settings={**child.environment, **settings}))
            ready = [f"http://127.0.0.1:{each}/readyz" for each in (port, coordinator_port)]
            _wait(supervisor, "the service", lambda: all(_answers(url) for url in ready))
            _wait(supervisor, "the jobs", lambda: _answers(f"{stack.dashboard_url}/bench/figures"))
            yield stack
    finally:
        end_everything(layout)
        supervisor.reap()


def fill(stack: LoadedStack, load: Load) -> None:
    """Add the projects and batches. One batch of each project is created by its client, and copied in Postgres."""
    projects = load.live if load.sharing == "project" else load.projects
    content = b"".join(_line(number) for number in range(1, load.lines + 1))
    with open_pool(stack.database_url, max_size=2) as pool, httpx.Client(trust_env=False) as http:
        for number in range(projects):
            project = create_project(pool, f"load {number}")
            key = create_api_key(pool, project_id=project.id, name="load")
            client = openai.OpenAI(base_url=stack.base_url, api_key=key, http_client=http)
            file = client.files.create(file=("load.jsonl", content), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            stack.tenants.append(Tenant(project_id=project.id, api_key=key, file_id=file.id, batch_id=batch.id))
    deadline = time.monotonic() + START_TIMEOUT_S
    while stack.sql("SELECT FROM batches WHERE status = 'validating'"):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the first batches were not validated; see {stack.layout.logs}")
        time.sleep(0.1)
    # All plans are equal: one object with many names.
    plan = stack.layout.objects / plan_key(stack.tenants[0].batch_id)
    shared = stack.layout.objects / "plan"
    os.link(plan, shared)
    copies = (load.live + load.queued) // projects - 1
    for tenant in stack.tenants:
        ids = [f"batch_{secrets.token_hex(16)}" for _ in range(copies)]
        for batch_id in ids:
            path = stack.layout.objects / plan_key(batch_id)
            path.parent.mkdir(parents=True)
            os.link(shared, path)
        own = load.sharing == "batch"
        stack.sql(_COPY, {"ids": ids, "template": tenant.batch_id, "own": own})
        stack.batch_ids += [tenant.batch_id, *ids]


# As the API and the reconciler create and accept a batch.
_COPY: Final = """
WITH copies AS (
    INSERT INTO batches (id, project_id, endpoint, input_file_id, completion_window, request_sha256, created_at,
                         expires_at, status, model, domain, segments_left, total, enqueued_requests, enqueued_tokens,
                         estimate, in_progress_at)
    SELECT copy.id, project_id, endpoint, input_file_id, completion_window, sha256(copy.id::bytea), now(),
           now() + interval '1 day', 'in_progress', model, CASE WHEN %(own)s THEN copy.id ELSE domain END,
           (SELECT count(*) FROM segments WHERE batch_id = batches.id), total, enqueued_requests, enqueued_tokens,
           estimate, now()
    FROM batches, unnest(%(ids)s::text[]) AS copy (id) WHERE batches.id = %(template)s
    RETURNING id, project_id, model, domain
), planned AS (
    INSERT INTO segments (batch_id, number, start_byte, end_byte, rows, tokens)
    SELECT copies.id, number, start_byte, end_byte, rows, tokens
    FROM copies, segments WHERE batch_id = %(template)s
), known AS (
    INSERT INTO domains (model, domain) SELECT DISTINCT model, domain FROM copies
    ON CONFLICT (model, domain) DO UPDATE SET failures = 0
    RETURNING model, domain
), turns AS (
    INSERT INTO turns (model, domain, project_id)
    SELECT DISTINCT model, domain, project_id FROM copies JOIN known USING (model, domain)
    ON CONFLICT DO NOTHING
)
INSERT INTO batch_events (batch_id, type)
SELECT id, type FROM copies, unnest(ARRAY['batch.validating', 'batch.in_progress']) AS type
"""


def _model(load: Load) -> dict[str, Any]:
    return {"id": MODEL, "source": "/nothing", "sharing": load.sharing, "keep_warm_s": KEEP_WARM_S}


def _line(number: int) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"Prompt {number} of a load test."}]}
    request = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(request).encode() + b"\n"


def _wait(supervisor: Supervisor, what: str, ready: Callable[[], bool]) -> None:
    supervisor.wait_until(ready, what=what, timeout_s=START_TIMEOUT_S, stopping=Event())


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def _raising_on_sigterm() -> Iterator[None]:
    """End the block on SIGTERM too, so that no process outlives this one."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(1)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
