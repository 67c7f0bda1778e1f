"""Changes of the product that break one rule each. A simulation that does not find them tests nothing."""

import importlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final
from unittest import mock

from service import db


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A rule that is broken.

    Attributes:
        name: what the changed code does.
        changes: the name of a query, or the path of a function (``module:name``); the text that is replaced; and its
            replacement.
    """

    name: str
    changes: Sequence[tuple[str, str, str]]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Break the rule for a while.

        Raises:
            ValueError: the product has no such text.
        """
        texts: dict[str, str] = {}
        for target, old, new in self.changes:
            text = texts.get(target) or _text(target)
            if old not in text:
                raise ValueError(f"{target} does not have the text that a mutant replaces: {old!r}. Adapt the mutant")
            texts[target] = text.replace(old, new)
        with ExitStack() as stack:
            for target, text in texts.items():
                module_name, _, name = target.rpartition(":")
                if not module_name:
                    stack.enter_context(mock.patch.dict(db._queries(), {name: text}))
                    continue
                module = importlib.import_module(module_name)
                names: dict[str, Any] = {}
                exec(text, dict(vars(module)), names)  # noqa: S102
                # It must see the names that the simulator patches in its module.
                function = FunctionType(names[name].__code__, vars(module), name, names[name].__defaults__)
                function.__kwdefaults__ = names[name].__kwdefaults__
                stack.enter_context(mock.patch.object(module, name, function))
            yield


def _text(target: str) -> str:
    """Return the text of a query or a function."""
    module_name, _, name = target.rpartition(":")
    if not module_name:
        return db.query(name)
    return inspect.getsource(getattr(importlib.import_module(module_name), name))


MUTANTS: Final = (
    Mutant(
        name="a commit ignores the epoch",
        changes=[
            (
                "service.coordinator.commits:_record_rows",
                'and segment["epoch"] == entry.epoch\n            and segment["job_id"] in {None, values["job_id"]}\n',
                "",
            )
        ],
    ),
    Mutant(
        name="a commit counts rows that are done already",
        changes=[
            ("service.coordinator.commits:_record_rows", "and not done & bits", ""),
            ("service.coordinator.commits:_record_rows", 'and not segment["is_done"]', ""),
            ("service.coordinator.commits:_record_rows", 'and segment["epoch"] == entry.epoch', ""),
        ],
    ),
    Mutant(
        name="a commit of a cancelled batch counts",
        changes=[("lock_batch_of_job", "SELECT status = 'in_progress'", "SELECT status <> 'validating'")],
    ),
    Mutant(
        name="a repeated commit is judged again",
        changes=[
            ("recorded_part", "WHERE key", "WHERE false AND key"),
            ("record_part", "%(refused_lines)s::bigint[])", "%(refused_lines)s::bigint[]) ON CONFLICT DO NOTHING"),
        ],
    ),
    Mutant(
        name="a segment is never done",
        changes=[("record_progress", "segments_left - %(segments_done)s", "segments_left - 0 * %(segments_done)s")],
    ),
    Mutant(
        name="a new lease keeps the epoch",
        changes=[("lease_turn", "epoch = epoch + 1", "epoch = greatest(epoch, 1)")],
    ),
    Mutant(
        name="a lease is given twice",
        changes=[
            ("lease_turn", "AND NOT is_done AND (job_id IS NULL OR leased_until < now())", ""),
            (
                "lease_turn",
                "SELECT batch_id, number, tokens FROM segments_to_lease",
                "SELECT batch_id, number, tokens FROM segments",
            ),
        ],
    ),
    Mutant(
        name="leases of an ended job are not released",
        changes=[("release_leases", "AND NOT is_done", "AND is_done")],
    ),
    Mutant(
        name="a job may end although there is work",
        changes=[("is_work_left", "SELECT EXISTS", "SELECT false AND EXISTS")],
    ),
    Mutant(
        name="assembly reads refused lines",
        changes=[("parts_of_batch", "refused_lines", "'{}'::bigint[] AS refused_lines")],
    ),
    Mutant(
        name="assembly leaves parts out",
        changes=[("parts_of_batch", "ORDER BY key", "ORDER BY key LIMIT 1")],
    ),
    Mutant(
        name="an assembly ends a batch whatever state it is in",
        changes=[("end_batch", "AND status = %(before)s", "")],
    ),
    Mutant(
        name="a plan is accepted twice",
        changes=[("accept_batch", "AND status = 'validating'", "")],
    ),
    Mutant(
        name="GPU seconds of jobs that served nothing are lost",
        changes=[("split_gpu_seconds", "LEFT JOIN served", "JOIN served")],
    ),
    Mutant(
        name="a job is launched without a slot",
        changes=[
            ("may_launch", ") < coalesce", ") < 1000 + coalesce"),
            (
                "jobs_to_advance",
                "position <= free AND draining_at IS NULL AND (SELECT max(free) FROM slots) > 0",
                "draining_at IS NULL",
            ),
        ],
    ),
    Mutant(
        name="a job that the launcher has does not count",
        changes=[
            (
                "may_launch",
                "job.accelerator AND gone_at IS NULL",
                "job.accelerator AND gone_at IS NULL AND ended_at IS NULL",
            ),
            (
                "jobs_to_advance",
                "waiting.accelerator AND gone_at IS NULL",
                "waiting.accelerator AND gone_at IS NULL AND ended_at IS NULL",
            ),
        ],
    ),
    Mutant(
        name="the pause of a domain never ends",
        changes=[("domains_without_job", "not_before > now()", "not_before IS NOT NULL")],
    ),
    Mutant(
        name="parts that are written late stay",
        changes=[("record_parts_deleted", "now() + interval '1 h'", "NULL")],
    ),
)
