"""What the simulation knows: the batches of its clients, the leases that it saw, and the answers that count."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ray_job.contract.leases import Commit, Lease, SegmentRef
from tests.simulation.database import Database
from tests.simulation.scheduler import RuleBrokenError, Scheduler

_LEASABLE: Final = """
SELECT batches.id FROM jobs JOIN batches USING (model, domain)
WHERE jobs.id = %(job_id)s AND jobs.draining_at IS NULL AND jobs.ended_at IS NULL
  AND status = 'in_progress' AND paused_at IS NULL AND giving_up_at IS NULL AND expires_at > %(now)s
  AND EXISTS (SELECT FROM segments
              WHERE batch_id = batches.id AND NOT is_done AND (job_id IS NULL OR leased_until < %(now)s))
ORDER BY batches.id
"""


@dataclass(slots=True, kw_only=True)
class ClientBatch:
    """A batch as its client knows it.

    Attributes:
        id: its id.
        project: its project.
        model: its model.
        requests: its lines in order: the custom_id and the body of each.
        paused: whether its client paused it.
        cancelled: whether its client cancelled it.
    """

    id: str
    project: str
    model: str
    requests: list[tuple[str, dict[str, Any]]]
    paused: bool = False
    cancelled: bool = False


@dataclass(slots=True, kw_only=True)
class Ledger:
    """See the module.

    Attributes:
        batches: the batches by id.
        domains: the sharing domain of each job.
        epochs: the newest epoch of each segment that a job got.
        leased: all leases that jobs got.
        answers: for each batch, the number of the answer of each line that counts.
        failures: how often a job ended without success.
        given_back: how often each batch's segments were given back.
    """

    database: Database
    scheduler: Scheduler
    sharing: Mapping[str, str]
    batches: dict[str, ClientBatch] = field(default_factory=dict)
    domains: dict[str, str] = field(default_factory=dict)
    epochs: dict[tuple[str, int], int] = field(default_factory=dict)
    leased: set[SegmentRef] = field(default_factory=set)
    answers: dict[str, dict[int, int]] = field(default_factory=dict)
    answered: int = 0

    def next_answer(self) -> int:
        """Return a number that no answer has."""
        self.answered += 1
        return self.answered

    def note_job(self, job_id: str) -> None:
        """Note the sharing domain of a job."""
        rows = self.database.look("SELECT domain FROM jobs WHERE id = %s", [job_id])
        self.domains[job_id] = rows[0]["domain"]

    def note_lease(self, lease: Lease, job_id: str, model: str, *, is_undisturbed: bool) -> None:
        """Check a new lease. With ``is_undisturbed``, nothing else happened since the job asked for it."""
        batch = self.batches[lease.batch_id]
        domain = {"batch": batch.id, "project": batch.project, "stack": "stack"}[self.sharing[batch.model]]
        if model != batch.model or domain != self.domains[job_id]:
            raise RuleBrokenError(
                f"{job_id} serves {model} for {self.domains[job_id]} and got {lease.ref} of {batch.project}"
            )
        if is_undisturbed and (batch.paused or batch.cancelled):
            raise RuleBrokenError(f"{job_id} got {lease.ref}, whose batch is paused or cancelled")
        known = self.epochs.get((lease.batch_id, lease.segment), 0)
        if lease.ref in self.leased or (is_undisturbed and lease.epoch <= known):
            raise RuleBrokenError(f"{job_id} got {lease.ref}, of which epoch {known} was given before")
        self.leased.add(lease.ref)
        # The answer to a job can arrive after another one has got a newer lease.
        self.epochs[lease.batch_id, lease.segment] = max(known, lease.epoch)

    def outdated(self, commit: Commit) -> list[bool]:
        """Return for each segment of a commit whether it must be refused.

        A newer lease of it is known, or its batch is cancelled, and the commit is not recorded yet.
        """
        is_cancelled = self.batches[commit.batch_id].cancelled
        old = [
            is_cancelled or each.epoch < self.epochs.get((commit.batch_id, each.segment), 0) for each in commit.segments
        ]
        return [False] * len(old) if any(old) and self.recorded(commit.key) is not None else old

    def recorded(self, key: str) -> tuple[bool, ...] | None:
        """Return the recorded answer to the commit of a part; None if it is not recorded."""
        rows = self.database.look("SELECT accepted FROM parts WHERE key = %s", [key])
        return tuple(rows[0]["accepted"]) if rows else None

    def is_over(self, batch_id: str) -> bool:
        """Return whether the records of a batch's parts are deleted."""
        return bool(
            self.database.look("SELECT id FROM batches WHERE id = %s AND parts_deleted_at IS NOT NULL", [batch_id])
        )

    def note_commit(self, commit: Commit, accepted: Sequence[bool], answers: Mapping[int, int]) -> None:
        """Note the answers of a commit that count. Each line counts once."""
        counted = self.answers.setdefault(commit.batch_id, {})
        for segment, counts in zip(commit.segments, accepted, strict=True):
            for line in segment.lines if counts else ():
                if counted.setdefault(line, answers[line]) != answers[line]:
                    raise RuleBrokenError(
                        f"line {line} of {commit.batch_id} was committed twice, again with {commit.key}"
                    )

    def leasable_work(self, job_id: str) -> list[str]:
        """Return the batches of which a job could lease segments now."""
        rows = self.database.look(_LEASABLE, {"job_id": job_id, "now": self.scheduler.now})
        return [row["id"] for row in rows]


def request_hash(body: Mapping[str, Any]) -> str:
    """Return a digest of a request's body."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
