"""Jobs: drivers that lease segments, run their rows, write parts and commit them; they die, hang and come back."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

import psycopg

from ray_job.contract.job_spec import JobSpec
from ray_job.contract.leases import (
    Commit,
    CommittedRows,
    EndRequest,
    Failure,
    Lease,
    PartUrlsRequest,
    SegmentRef,
    SyncRequest,
)
from ray_job.contract.lines import error_body, response_line
from ray_job.contract.object_keys import plan_key
from ray_job.contract.parts import PartRow, Usage, encode_part
from ray_job.contract.plans import PlanRow, bitmap, bitmap_rows, decode_rows
from service.coordinator import commits, leasing
from service.coordinator.errors import JobEndedError
from service.errors import ObjectNotFoundError, ObjectStoreError
from service.ports import JobState, JobStatus
from tests.simulation.database import Database
from tests.simulation.ledger import Ledger, request_hash
from tests.simulation.ports import SimulatedLauncher, SimulatedStore
from tests.simulation.scheduler import RuleBrokenError, Scheduler

# What a driver answers with a later try: the coordinator or the store cannot be reached.
_UNREACHABLE: Final = (psycopg.OperationalError, ObjectStoreError)
_SUCCEEDED: Final = JobStatus(state=JobState.SUCCEEDED)
_FAILED: Final = JobStatus(state=JobState.FAILED, message="simulated: the driver died")
# Longer than a lease, than a job may be silent, and than URLs are valid.
_SLEEPS_S: Final = (5, 61, 70, 70, 120, 300, 700, 4_000)
_URL_LIFETIME: Final = timedelta(seconds=leasing.URL_EXPIRES_S)


@dataclass(slots=True, kw_only=True)
class _Part:
    """A part, and the record of it."""

    commit: Commit
    answers: dict[int, int]
    accepted: tuple[bool, ...] | None = None


@dataclass(slots=True, kw_only=True)
class Job:
    """The driver of a job.

    Attributes:
        spec: its spec.
        token: its token.
        leases: the segments that it holds, with their rows that are neither committed nor in ``finished``.
        finished: rows that ran and are in no part.
        written: parts that were written, the oldest first.
        places: keys of parts by batch, and until when their URLs are valid.
        asleep_until: it does nothing until then.
        is_over: it has ended.
        is_busy: an action of it was interrupted.
    """

    spec: JobSpec
    token: str
    scheduler: Scheduler
    database: Database
    store: SimulatedStore
    launcher: SimulatedLauncher
    ledger: Ledger
    leases: dict[SegmentRef, tuple[Lease, dict[int, PlanRow]]] = field(default_factory=dict)
    finished: dict[SegmentRef, dict[int, PlanRow]] = field(default_factory=dict)
    written: list[_Part] = field(default_factory=list)
    places: dict[str, list[tuple[str, datetime]]] = field(default_factory=dict)
    asleep_until: datetime | None = None
    is_over: bool = False
    is_busy: bool = False

    @property
    def id(self) -> str:
        """Its id."""
        return self.spec.job_id

    def act(self) -> None:
        """Do one random thing."""
        scheduler = self.scheduler
        if self.asleep_until is not None:
            if scheduler.now < self.asleep_until:
                return
            self._wake()
            return
        if self.leases and scheduler.happens(scheduler.rates.sleep):
            self.asleep_until = scheduler.now + timedelta(seconds=scheduler.random.choice(_SLEEPS_S))
            scheduler.note(self.id, "sleeps until", self.asleep_until)
            return
        actions: list[tuple[Callable[[], object], float]] = [(self.sync, 3.0 if not self.leases else 1.0)]
        if any(rows for _, rows in self.leases.values()):
            actions.append((self.run, 4.0))
        if self.finished:
            actions.append((self.write, 4.0))
        if self._has_uncommitted():
            actions.append((self.commit, 4.0))
        if self.written:
            actions.append((self.commit_again, 0.6))
        if self.leases:
            actions.append((self.give_back, scheduler.rates.give_back))
        else:
            actions.append((self.end, 1.5))
        choice, weights = zip(*actions, strict=True)
        self._try(scheduler.random.choices(choice, weights)[0])

    def settle(self) -> None:
        """Do all that is left to do, once no fault happens any more."""
        if self.asleep_until is not None:
            if self.scheduler.now >= self.asleep_until:
                self._wake()
            return
        for _ in range(4):
            if not self.is_over:
                self._try(self.sync)
            while not self.is_over and any(rows for _, rows in self.leases.values()):
                self.run()
            while not self.is_over and self.finished:
                self._try(self.write)
            while not self.is_over and self._has_uncommitted():
                self._try(self.commit)
        if not self.leases and not self.is_over:
            self._try(self.end)

    def die(self) -> None:
        """End without a word."""
        self.is_over = True

    def _wake(self) -> None:
        """Go on after a long pause: commit all that it has, as if no time had passed."""
        self.scheduler.note(self.id, "wakes")
        self.asleep_until = None
        while any(rows for _, rows in self.leases.values()):
            self.run()
        for _ in range(3):
            if not self.is_over and self.finished:
                self._try(self.write)
            if not self.is_over and self._has_uncommitted():
                self._try(self.commit)

    def _has_uncommitted(self) -> bool:
        return any(part.accepted is None for part in self.written)

    def _try(self, action: Callable[[], object]) -> None:
        scheduler = self.scheduler
        scheduler.skew, scheduler.may_die = timedelta(), False
        self.launcher.run(self.id)
        self.is_busy = True
        try:
            result = action()
        except JobEndedError:
            scheduler.note(self.id, action.__name__, "the token is void")
            self._exit(_FAILED)
        except _UNREACHABLE as error:
            scheduler.note(self.id, action.__name__, type(error).__name__, error)
        else:
            scheduler.note(self.id, action.__name__, "" if result is None else result)
        finally:
            self.is_busy = False

    def _exit(self, status: JobStatus) -> None:
        self.is_over = True
        self.launcher.end_later(self.id, status)

    def _authenticate(self) -> None:
        job = leasing.authenticate(self.database, self.token)  # type: ignore[arg-type]
        if job.id != self.id:
            raise RuleBrokenError(f"the token of {self.id} is that of {job.id}")

    def sync(self) -> str:
        """Extend the leases, and take new ones."""
        tokens = self.scheduler.random.choice((150, 400, 10**9))
        request = SyncRequest(wanted_tokens=tokens, wait_s=0, held=tuple(self.leases), engines=1)
        self._authenticate()
        before = self.scheduler.actions
        answer = leasing.sync(self.database, self.store, self.id, request)  # type: ignore[arg-type]
        is_undisturbed = before == self.scheduler.actions
        for ref in answer.lost:
            self._lose(ref)
        for lease in answer.leases:
            self.ledger.note_lease(lease, self.id, self.spec.model.id, is_undisturbed=is_undisturbed)
        for lease in answer.leases:
            self._read(lease)
        return f"leases {[(each.batch_id, each.segment, each.epoch) for each in answer.leases]} lost {answer.lost}"

    def _read(self, lease: Lease) -> None:
        try:
            plan = b"".join(self.store.read(plan_key(lease.batch_id)))
        except ObjectNotFoundError:
            # Refused as for an URL whose object is gone.
            self._fail(lease.ref, "the plan does not exist")
            return
        rows = dict(enumerate(decode_rows(plan[lease.start : lease.end])))
        if len(rows) != lease.rows:
            raise RuleBrokenError(f"{lease.ref} has {len(rows)} rows in the plan and {lease.rows} in its lease")
        done = bitmap_rows(lease.done)
        self.leases[lease.ref] = lease, {number: row for number, row in rows.items() if number not in done}

    def run(self) -> str:
        """Run some rows of a segment."""
        ready = [ref for ref, (_, rows) in self.leases.items() if rows]
        ref = self.scheduler.random.choice(ready)
        rows = self.leases[ref][1]
        chosen = list(rows)[: self.scheduler.random.randint(1, len(rows))]
        self.finished.setdefault(ref, {}).update({number: rows.pop(number) for number in chosen})
        return f"{ref.batch_id} {ref.segment} rows {chosen}"

    def write(self) -> str:
        """Write the finished rows of a batch as a part."""
        batch_id = self.scheduler.random.choice(sorted({ref.batch_id for ref in self.finished}))
        place = self._place(batch_id)
        if place is None:
            for ref in [ref for ref in {**self.leases, **self.finished} if ref.batch_id == batch_id]:
                self._lose(ref)
            return f"{batch_id} takes no parts"
        key, valid_until = place
        results: list[PartRow] = []
        segments: list[CommittedRows] = []
        answers: dict[int, int] = {}
        refs = [ref for ref in self.finished if ref.batch_id == batch_id]
        for ref in refs:
            rows = self.finished[ref]
            own = [result for row in rows.values() for result in self._results(batch_id, row, answers)]
            results += own
            segments.append(_committed_rows(ref, rows, own))
        if self.scheduler.now > valid_until:
            return f"the URL of {key} has expired"
        self.store.put(key, [encode_part(batch_id, results)])
        for ref in refs:
            # Meanwhile nothing else of this driver ran.
            del self.finished[ref]
        self.written.append(_Part(commit=Commit(batch_id=batch_id, key=key, segments=tuple(segments)), answers=answers))
        return f"{key} {[(each.segment, each.epoch, each.lines) for each in segments]}"

    def _place(self, batch_id: str) -> tuple[str, datetime] | None:
        """Return the key of a place for a part, and until when its URL is valid; None if the batch has ended.

        Some are taken ahead.
        """
        stock = self.places.setdefault(batch_id, [])
        while stock and stock[0][1] < self.scheduler.now:
            del stock[0]
        if not stock:
            self._authenticate()
            request = PartUrlsRequest(batch_id=batch_id, count=2)
            valid_until = self.scheduler.now + _URL_LIFETIME
            answer = commits.part_urls(self.database, self.store, self.id, request)  # type: ignore[arg-type]
            stock += [(part.key, valid_until) for part in answer.parts]
        return stock.pop(0) if stock else None

    def _results(self, batch_id: str, row: PlanRow, answers: dict[int, int]) -> list[PartRow]:
        """Return the results of a row and its twins. Each has the hash of the request, and a number of its own run."""
        request = json.loads(row.raw)
        number = self.ledger.next_answer()
        usage = Usage(input_tokens=len(row.raw), output_tokens=1 + number % 7)
        fails = "refuse" in request["body"]["messages"][0]["content"]
        said = json.dumps({"hash": request_hash(request["body"]), "number": number, "input": len(row.raw)})
        body = (
            error_body(said, type="invalid_request_error", param=None, code=None)
            if fails
            else json.dumps({"said": said}, separators=(",", ":")).encode()
        )
        lines = [(row.line, request["custom_id"]), *row.twins]
        answers.update({line: number for line, _ in lines})
        return [
            PartRow(
                line=line,
                outcome="failed" if fails else "completed",
                data=response_line(batch_id, line, custom_id, 400 if fails else 200, body),
                usage=usage,
            )
            for line, custom_id in lines
        ]

    def commit(self) -> str:
        """Commit the oldest part without an answer."""
        return self._commit(next(part for part in self.written if part.accepted is None))

    def commit_again(self) -> str:
        """Repeat a commit."""
        return self._commit(self.scheduler.random.choice(self.written))

    def _commit(self, part: _Part) -> str:
        message = part.commit
        self._authenticate()
        outdated = self.ledger.outdated(message)
        try:
            accepted = commits.commit(self.database, self.id, message).accepted  # type: ignore[arg-type]
        except psycopg.OperationalError:
            # The driver does not know whether the commit counted; the simulation does.
            if (recorded := self.ledger.recorded(message.key)) is not None:
                self.ledger.note_commit(message, recorded, part.answers)
            raise
        if part.accepted not in {None, accepted} and any(part.accepted) and not self.ledger.is_over(message.batch_id):
            raise RuleBrokenError(f"the commit of {message.key} was answered {part.accepted}, then {accepted}")
        for segment, counts, is_outdated in zip(message.segments, accepted, outdated, strict=True):
            ref = SegmentRef(batch_id=message.batch_id, segment=segment.segment, epoch=segment.epoch)
            if counts and is_outdated:
                raise RuleBrokenError(f"a commit under an old epoch, or of a cancelled batch, counted: {ref}")
            if not counts:
                self._lose(ref)
            elif ref in self.leases and not (
                self.leases[ref][1] or ref in self.finished or self._has_unsent(ref, part)
            ):
                del self.leases[ref]
        self.ledger.note_commit(message, accepted, part.answers)
        part.accepted = accepted
        return f"{message.key} {accepted}"

    def _has_unsent(self, ref: SegmentRef, committed: _Part) -> bool:
        return any(
            part is not committed
            and part.accepted is None
            and part.commit.batch_id == ref.batch_id
            and any((each.segment, each.epoch) == (ref.segment, ref.epoch) for each in part.commit.segments)
            for part in self.written
        )

    def give_back(self) -> str:
        """Give a segment back that cannot be run."""
        ref = self.scheduler.random.choice(list(self.leases))
        self._authenticate()
        self._fail(ref, "simulated: the segment cannot be read")
        return f"{ref.batch_id} {ref.segment}"

    def _fail(self, ref: SegmentRef, reason: str) -> None:
        self._lose(ref)
        message = Failure(batch_id=ref.batch_id, segment=ref.segment, epoch=ref.epoch, reason=reason)
        commits.fail(self.database, self.id, message)  # type: ignore[arg-type]

    def end(self) -> str:
        """Ask to end."""
        self._authenticate()
        work = self.ledger.leasable_work(self.id)
        before = self.scheduler.actions
        answer = leasing.end(self.database, self.id, EndRequest(engine_s=1, busy_s=1))  # type: ignore[arg-type]
        if answer.ended and work and before == self.scheduler.actions:
            raise RuleBrokenError(f"{self.id} has ended although there was work for it: {work}")
        if answer.ended:
            self._exit(_SUCCEEDED)
        return "ended" if answer.ended else "there is work"

    def _lose(self, ref: SegmentRef) -> None:
        self.leases.pop(ref, None)
        self.finished.pop(ref, None)


def _committed_rows(ref: SegmentRef, rows: dict[int, PlanRow], results: Sequence[PartRow]) -> CommittedRows:
    usage = Usage()
    for result in results:
        usage += result.usage
    completed = sum(result.outcome == "completed" for result in results)
    return CommittedRows(
        segment=ref.segment,
        epoch=ref.epoch,
        rows=bitmap(rows),
        lines=tuple(result.line for result in results),
        completed=completed,
        failed=len(results) - completed,
        usage=usage,
    )
