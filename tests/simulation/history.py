"""One history: actors that a seed sets in motion, then quiet, then the checks."""

import dataclasses
import json
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any, Final

import psycopg

from ray_job.contract.job_spec import JobSpec, ModelSpec
from ray_job.contract.object_keys import file_key
from service.audit.log import Actor
from service.backends import Slots
from service.coordinator import leasing
from service.db import query
from service.errors import LauncherError, ObjectStoreError
from service.model_catalogue import CatalogueModel
from service.ports import JobState, JobStatus
from service.reconciler.backends import Backends
from service.reconciler.jobs import advance_job, create_jobs, jobs_to_advance
from service.reconciler.loop import batches_to_advance
from service.reconciler.retention import sweep
from service.reconciler.steps import advance
from service.workspace import Workspace
from tests.simulation.checks import check_end, check_state, open_work
from tests.simulation.database import Database
from tests.simulation.jobs import Job
from tests.simulation.ledger import ClientBatch, Ledger
from tests.simulation.ports import SimulatedLauncher, SimulatedStore
from tests.simulation.scheduler import Killed, Rates, RuleBrokenError, Scheduler

_CHAT: Final = "/v1/chat/completions"
_PROJECTS: Final = ("project-a", "project-b", "project-c")
_MODELS: Final = (
    ModelSpec(id="own", source="x", sharing="batch", accelerator="v100"),
    ModelSpec(id="project", source="x", sharing="project"),
    ModelSpec(id="stack", source="x", sharing="stack"),
    ModelSpec(id="other", source="x", sharing="stack", accelerator="v100"),
)
_SHARING: Final = {model.id: model.sharing for model in _MODELS}
# What the loop of the reconciler retries; any other error is a defect.
_CLIENT: Final = Actor(id="key_1")
_TRANSIENT: Final = (ObjectStoreError, LauncherError, psycopg.OperationalError)
_PASS_LIMIT: Final = 200
_MOST_BATCHES: Final = 4
# Most defects need few actions. Some need many.
_ACTIONS: Final = ((2, 14), (10, 34))
# Seconds between two rounds at the end of a history: the longer, the more rounds without progress came before.
_ROUNDS_S: Final = (2, 5, 30, 90, 300, 600)
_QUIET_WITHIN: Final = timedelta(minutes=90)
# Until the last URLs have expired, and everything that is due later than on the database's clock.
_LEFTOVERS: Final = timedelta(hours=1, minutes=25)
_HOURS_S: Final = 3_600.0


class Reconciler:
    """A leader. Its lists of what to advance can be old, and so can what it knows of each batch and job."""

    def __init__(self, name: str, backends: Backends, scheduler: Scheduler, skew: timedelta) -> None:
        self.name = name
        self._scheduler = scheduler
        self._skew = skew
        self._backends = backends
        self._batches: list[str] = []
        self._jobs: list[str] = []
        self._after_seq = 0
        self._is_busy = False

    def act(self) -> None:
        """Take one step: look for work, or advance one batch or job of the last list."""
        scheduler = self._scheduler
        if self._is_busy:
            return
        if scheduler.happens(0.25) or not (self._batches or self._jobs):
            self._attempt("looks", self._look)
            return
        if scheduler.happens(0.25):
            self.run_pass()
        elif self._batches and (not self._jobs or scheduler.happens(0.5)):
            self._advance_batch(scheduler.random.choice(self._batches))
        else:
            self._advance_job(scheduler.random.choice(self._jobs))

    def run_pass(self) -> None:
        """Look for work and advance all of it."""
        if self._is_busy or not self._attempt("passes", self._look):
            return
        jobs, batches = list(self._jobs), list(self._batches)
        for job_id in jobs:
            self._advance_job(job_id)
        for batch_id in batches:
            self._advance_batch(batch_id)

    def sweep(self) -> None:
        """Delete what is past its retention."""
        self._attempt("sweeps", lambda: sweep(self._backends, Event()))

    def _look(self) -> None:
        create_jobs(self._backends)
        self._batches = batches_to_advance(self._backends.pool)
        after_seq = self._after_seq
        rows = jobs_to_advance(
            self._backends, after_running=after_seq, after_ending=after_seq, limit=_PASS_LIMIT, looks=_PASS_LIMIT
        )
        self._jobs = [row["id"] for row in rows]
        if rows:
            self._after_seq = rows[0]["seq"]

    def _advance_batch(self, batch_id: str) -> None:
        self._attempt(f"advances {batch_id}", lambda: advance(self._backends, batch_id))

    def _advance_job(self, job_id: str) -> None:
        self._attempt(f"advances {job_id}", lambda: advance_job(self._backends, job_id))

    def _attempt(self, what: str, step: Callable[[], None]) -> bool:
        """Take a step as the loop does. If the process is killed, the next one knows nothing."""
        scheduler = self._scheduler
        scheduler.skew, scheduler.may_die = self._skew, True
        scheduler.note(self.name, what)
        self._is_busy = True
        try:
            step()
        except _TRANSIENT as error:
            scheduler.note(self.name, "failed:", type(error).__name__)
            return False
        except Killed:
            self._backends = dataclasses.replace(self._backends, tokens={})
            self._batches, self._jobs, self._after_seq = [], [], 0
            return False
        finally:
            self._is_busy = False
            scheduler.skew, scheduler.may_die = timedelta(), False
        return True


class History:
    """One history.

    Args:
        seed: decides everything.
        database: Postgres.
        workspace: a directory for plans and assemblies.
    """

    def __init__(self, seed: int, database: Database, workspace: Path) -> None:
        chance = random.Random(seed)  # noqa: S311 - not for secrets
        self.scheduler = Scheduler(chance, meddle=self._meddle)
        self._database = database
        self._jobs: list[Job] = []
        self._accelerators: dict[str, str] = {}
        self._store = SimulatedStore(self.scheduler)
        self._launcher = SimulatedLauncher(self.scheduler, self._start, self._kill)
        self._ledger = Ledger(database=database, scheduler=self.scheduler, sharing=_SHARING)
        self._catalogue = {model.id: CatalogueModel(spec=model) for model in _MODELS}
        self._usual_model = chance.choice(_MODELS)
        self._slots = Slots(default=chance.choice((1, 1, 2)))
        skews = [timedelta(minutes=chance.choice((0, 0, 0, -10, 10, chance.uniform(-10, 10)))) for _ in range(2)]
        self._leaders = [
            Reconciler(name, self._backends(workspace), self.scheduler, skew)
            for name, skew in zip(("leader", "second leader"), skews, strict=True)
        ]

    def _backends(self, workspace: Path) -> Backends:
        return Backends(
            pool=self._database,  # type: ignore[arg-type] # all that is used of it
            store=self._store,
            launcher=self._launcher,
            catalogue=self._catalogue,
            coordinator_url="http://127.0.0.1:1",
            workspace=Workspace(workspace),
            slots=self._slots,
        )

    def run(self) -> dict[str, int]:
        """Run the history, and return how many batches ended in which state.

        Raises:
            RuleBrokenError: a rule was broken.
        """
        chance = self.scheduler.random
        self._database.begin(self.scheduler)
        leasing._known_prompt_rules.clear()
        # Some histories are free of a kind of trouble, and some are full of it: a little of everything hides defects.
        self.scheduler.rates = Rates(
            store=chance.choice((0.0, 0.01, 0.08)),
            launcher=chance.choice((0.0, 0.02, 0.15)),
            commit=chance.choice((0.0, 0.01, 0.05)),
            kill=chance.choice((0.0, 0.0, 0.01)),
            between=chance.choice((0.0, 0.02, 0.08, 0.25)),
            within=chance.choice((0.0, 0.01, 0.04)),
            sleep=chance.choice((0.0, 0.1, 0.4)),
            give_back=chance.choice((0.0, 0.1, 1.0)),
        )
        self._weights = {
            self._cancel: chance.choice((0.0, 0.2, 0.5)),
            self._pause: chance.choice((0.0, 0.2, 1.0)),
            self._pass_time: chance.choice((1.0, 2.5, 4.0)),
            self._second_leader: chance.choice((0.0, 0.5, 2.0)),
            self._job_dies: chance.choice((0.0, 0.1, 0.7)),
            self._launcher_forgets: chance.choice((0.0, 0.0, 0.3)),
            self._change_model: chance.choice((0.0, 0.3, 1.0)),
        }
        self._haste = chance.choice((0.1, 0.5, 0.9))
        for _ in range(chance.choice((1, 1, 2, 3))):
            self._create_batch()
        # Without a usual beginning, most of the actions would find nothing to do.
        for _ in range(chance.choice((0, 2, 2, 2))):
            self._leaders[0].run_pass()
        for _ in range(chance.randint(*chance.choice(_ACTIONS))):
            self._act()
            self._check_state()
        self._settle()
        return check_end(self._database, self._store, self._ledger)

    def _act(self) -> None:
        """Let one actor act."""
        self.scheduler.actions += 1
        events: list[tuple[Callable[[], None], float]] = [
            (self._create_batch, 0.6 if len(self._ledger.batches) < _MOST_BATCHES else 0),
            *self._weights.items(),
            (self._leaders[0].run_pass, 1.5),
            (self._leaders[0].act, 1.5),
            (self._job_acts, 9.0 if self._living() else 0),
            (self._restart_coordinator, 0.05),
            (self._leaders[0].sweep, 0.05),
        ]
        choices, weights = zip(*events, strict=True)
        self.scheduler.random.choices(choices, weights)[0]()

    def _check_state(self) -> None:
        if self._database.has_changed():
            check_state(self._database, self._launcher, self._accelerators, self._slots)

    def _meddle(self) -> None:
        for _ in range(self.scheduler.random.choice((1, 1, 2, 4))):
            # Between two looks of a reconciler, mostly jobs act.
            if self._living() and self.scheduler.happens(0.4):
                self.scheduler.actions += 1
                self._job_acts()
            else:
                self._act()

    def _living(self) -> list[Job]:
        return [job for job in self._jobs if not (job.is_over or job.is_busy)]

    def _job_acts(self) -> None:
        job = self.scheduler.random.choice(self._living())
        for _ in range(self.scheduler.random.choice((1, 2, 4))):
            if not (job.is_over or job.is_busy):
                job.act()

    def _second_leader(self) -> None:
        self._leaders[1].act()

    def _job_dies(self) -> None:
        if not (living := self._living()):
            return
        job = self.scheduler.random.choice(living)
        self.scheduler.note(job.id, "dies")
        job.is_over = True
        self._launcher.end_later(job.id, JobStatus(state=JobState.FAILED, message="simulated: it died"))

    def _launcher_forgets(self) -> None:
        if not self._jobs:
            return
        job = self.scheduler.random.choice(self._jobs)
        self.scheduler.note("the launcher forgets", job.id)
        self._launcher.forget_one(job.id)

    def _change_model(self) -> None:
        """Change the settings of a model: its job is drained, and another one takes the domain's work."""
        model = self._model()
        changed = dataclasses.replace(model, engine_args={"seed": self.scheduler.actions})
        self._catalogue[model.id] = CatalogueModel(spec=changed)
        self.scheduler.note("changed", model.id)

    def _restart_coordinator(self) -> None:
        leasing._known_prompt_rules.clear()

    def _pass_time(self) -> None:
        chance = self.scheduler.random
        seconds = chance.choice((0.001, 0.2, 1, 5, 20, 70, chance.uniform(60, 700), chance.uniform(600, 3 * _HOURS_S)))
        if self.scheduler.happens(self._haste):
            seconds = min(seconds, 5)
        self.scheduler.advance(seconds)
        self.scheduler.note("time", self.scheduler.now.isoformat())

    def _start(self, spec: JobSpec, token: str) -> None:
        job = Job(
            spec=spec,
            token=token,
            scheduler=self.scheduler,
            database=self._database,
            store=self._store,
            launcher=self._launcher,
            ledger=self._ledger,
        )
        self._jobs.append(job)
        self._accelerators[job.id] = spec.model.accelerator
        self._ledger.note_job(job.id)
        self.scheduler.note("started", job.id, spec.model.id)

    def _kill(self, job_id: str) -> None:
        for job in self._jobs:
            # A driver on a node that is cut off runs on, whatever the launcher reports.
            if job.id == job_id and not self.scheduler.happens(0.2):
                self.scheduler.note("killed", job.id)
                job.is_over = True

    def _model(self) -> ModelSpec:
        """Return a model; most often the same one, so that batches meet in a domain."""
        return self.scheduler.random.choice((*_MODELS, *[self._usual_model] * 6))

    def _create_batch(self) -> None:
        chance = self.scheduler.random
        batch_id = f"batch_{len(self._ledger.batches) + 1}"
        project, model = chance.choice(_PROJECTS), self._model().id
        contents = [f"{batch_id} {number} {chance.random()}" for number in range(chance.randint(2, 12))]
        contents = [f"refuse {content}" if self.scheduler.happens(0.1) else content for content in contents]
        for number in range(1, len(contents)):
            if self.scheduler.happens(0.15):
                contents[number] = contents[chance.randrange(number)]
        requests = [
            (
                f"id-{number}",
                {
                    "model": model,
                    "messages": [{"role": "user", "content": content}],
                    "max_tokens": 20,
                    "temperature": 0,
                },
            )
            for number, content in enumerate(contents, 1)
        ]
        lines = [
            json.dumps({"custom_id": custom_id, "method": "POST", "url": _CHAT, "body": body}).encode()
            for custom_id, body in requests
        ]
        batch = ClientBatch(id=batch_id, project=project, model=model, requests=requests)
        content = b"\n".join(lines)
        file_id = f"file-{batch_id}"
        values: dict[str, Any] = {
            "id": file_id,
            "project_id": project,
            "purpose": "batch",
            "filename": "in.jsonl",
            "size_bytes": len(content),
            "sha256": b"",
            "line_count": len(lines),
            "expires_after_s": None,
            **_CLIENT.values(),
        }
        creation: dict[str, Any] = {
            "id": batch_id,
            "project_id": project,
            "endpoint": _CHAT,
            "input_file_id": file_id,
            "completion_window": "24h",
            "completion_window_s": chance.choice((24, 24, 24, 24, 0.02, 0.5)) * _HOURS_S,
            "metadata": None,
            "output_expires_after_s": None,
            "request_sha256": b"",
            "idempotency_key": None,
            "enqueued_requests": len(lines),
            "enqueued_tokens": len(content) // 4,
            "priority": chance.choice((0, 0, 0, 5, -5)),
            "audited_file_id": file_id,
            **_CLIENT.values(),
        }

        def create() -> None:
            self._store._objects[file_key(file_id)] = content
            with self._database.connection() as connection:
                connection.execute(
                    "INSERT INTO projects (id, name) VALUES (%s, %s) ON CONFLICT DO NOTHING", [project, project]
                )
                connection.execute(query("insert_file"), values)
                connection.execute(query("insert_batch"), creation)

        self._ledger.batches[batch_id] = batch
        if not self._change(create):
            del self._ledger.batches[batch_id]
            return
        self.scheduler.note("created", batch_id, project, model, len(lines), creation["completion_window_s"])

    def _cancel(self) -> None:
        batch = self.scheduler.random.choice(list(self._ledger.batches.values()) or [None])
        if batch is not None and self._change_batch(batch, "cancel_batch"):
            self.scheduler.note("cancelled", batch.id)
            batch.cancelled = True
            if self.scheduler.happens(0.5):
                self._leaders[0].run_pass()  # Postgres notifies it

    def _pause(self) -> None:
        batch = self.scheduler.random.choice(list(self._ledger.batches.values()) or [None])
        if batch is not None:
            name = "resume_batch" if batch.paused else "pause_batch"
            if self._change_batch(batch, name):
                self.scheduler.note(name, batch.id)
                batch.paused = name == "pause_batch"

    def _change_batch(self, batch: ClientBatch, name: str) -> bool:
        """Change a batch as the API does. Return whether anything was changed."""
        changed = 0

        def change() -> None:
            nonlocal changed
            parameters = {"id": batch.id, "project_id": batch.project, **_CLIENT.values()}
            with self._database.connection() as connection:
                cursor = connection.execute(query(name), parameters)
                changed = cursor.rowcount

        return self._change(change) and changed > 0

    def _change(self, change: Callable[[], None]) -> bool:
        """Make a change of a client. Faults of its own calls teach nothing, but it may have to wait for a lock."""
        rates, self.scheduler.rates = self.scheduler.rates, Rates()
        may_die, self.scheduler.may_die = self.scheduler.may_die, False
        try:
            change()
        except psycopg.OperationalError:
            return False
        finally:
            self.scheduler.rates, self.scheduler.may_die = rates, may_die
        return True

    def _settle(self) -> None:
        """End all faults, and let everything run until it is over.

        Raises:
            RuleBrokenError: something is not over in time.
        """
        scheduler = self.scheduler
        scheduler.rates = Rates()
        scheduler.note("no more faults")
        for batch in self._ledger.batches.values():
            if batch.paused and scheduler.happens(0.5):
                self._change_batch(batch, "resume_batch")
                batch.paused = False
        for is_last in (False, True):
            self._run_until_quiet()
            if not is_last:
                # What is still paused misses its deadline. Parts that are written late are deleted.
                scheduler.advance(_LEFTOVERS.total_seconds())
                if any(batch.paused for batch in self._ledger.batches.values()):
                    scheduler.advance(25 * _HOURS_S)
                for job in self._jobs:
                    if not job.is_over:
                        job.settle()
        scheduler.advance(_LEFTOVERS.total_seconds())
        self._leaders[0].sweep()

    def _run_until_quiet(self) -> None:
        scheduler = self.scheduler
        deadline, rounds_idle = scheduler.now + _QUIET_WITHIN, 0
        work, state = list[str](), tuple[object, ...]()
        while scheduler.now < deadline:
            scheduler.advance(_ROUNDS_S[min(rounds_idle, len(_ROUNDS_S) - 1)])
            scheduler.actions += 1
            for job_id in self._launcher.alive():
                self._launcher.settle(job_id)
            self._leaders[0].run_pass()
            for job in self._jobs:
                if not job.is_over:
                    job.settle()
            self._check_state()
            before, work = state, open_work(self._database, self._launcher)
            if not work:
                return
            state = (len(self._jobs), self._ledger.answered, work)
            rounds_idle = 0 if state != before else rounds_idle + 1
        raise RuleBrokenError(f"not over {_QUIET_WITHIN} after the last fault: {work}")
