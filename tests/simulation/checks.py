"""The rules: those that hold after each action, and those that hold once a history is over."""

import json
from collections.abc import Mapping
from typing import Any, Final

from ray_job.contract.lines import line_id
from ray_job.contract.object_keys import file_key
from ray_job.contract.parts import Usage
from service.backends import Slots
from service.db import query
from tests.simulation.database import Database
from tests.simulation.ledger import ClientBatch, Ledger, request_hash
from tests.simulation.ports import SimulatedLauncher, SimulatedStore
from tests.simulation.scheduler import RuleBrokenError

_STATE: Final = """
SELECT (SELECT string_agg(job_id || ' has ' || batch_id || ' ' || number, ', ')
        FROM segments JOIN jobs ON jobs.id = job_id WHERE ended_at IS NOT NULL AND NOT is_done) AS held_by_ended,
       (SELECT string_agg(id, ', ') FROM batches
        WHERE status = 'in_progress'
          AND segments_left <> (SELECT count(*) FROM segments WHERE batch_id = batches.id AND NOT is_done)
       ) AS miscounted,
       (SELECT string_agg(concat_ws(' ', id, created_at, launched_at, draining_at, now()), ', ') FROM jobs
        WHERE launched_at < created_at OR draining_at < created_at OR greatest(launched_at, draining_at) > now()
       ) AS mistimed,
       (SELECT array_agg(id) FROM jobs WHERE launched_at IS NULL) AS unrecorded,
       (SELECT jsonb_object_agg(accelerator, taken) FROM (
            SELECT accelerator, count(*) AS taken FROM jobs
            WHERE gone_at IS NULL AND launch_after IS NULL GROUP BY accelerator) AS used) AS taken
"""
_HELD: Final = """
SELECT (SELECT coalesce(sum(gpus * extract(epoch FROM greatest(gone_at, split_at) - running_since)), 0)
        FROM jobs)::double precision AS held,
       (SELECT coalesce(sum(gpu_seconds + overhead_gpu_seconds), 0) FROM daily_usage) AS counted
"""
_FINAL_STATES: Final = {"completed", "failed", "cancelled", "expired"}


def check_state(database: Database, launcher: SimulatedLauncher, accelerators: Mapping[str, str], slots: Slots) -> None:
    """Check what must hold at any time.

    Raises:
        RuleBrokenError: a rule is broken.
    """
    state = database.look(_STATE)[0]
    if state["held_by_ended"]:
        raise RuleBrokenError(f"ended jobs hold leases: {state['held_by_ended']}")
    if state["miscounted"]:
        raise RuleBrokenError(f"segments_left is wrong: {state['miscounted']}")
    if state["mistimed"]:
        raise RuleBrokenError(f"times of jobs are not those of the database: {state['mistimed']}")
    running: dict[str, int] = {}
    # If the answer to a launch is lost, or its record, only the launcher knows that the job has a slot.
    unrecorded = set(state["unrecorded"] or ())
    for job_id in launcher.alive():
        if job_id not in unrecorded:
            accelerator = accelerators[job_id]
            running[accelerator] = running.get(accelerator, 0) + 1
    for taken in (state["taken"] or {}, running):
        for accelerator, count in taken.items():
            most = slots.by_accelerator.get(accelerator, slots.default)
            if count > most:
                raise RuleBrokenError(f"{count} jobs hold the {most} slots of {accelerator}")


def open_work(database: Database, launcher: SimulatedLauncher) -> list[str]:
    """Return what is not over: jobs, and batches, except those that are paused until their deadline."""
    rows = database.look(
        "SELECT id || ' ' || status AS work FROM batches WHERE parts_deleted_at IS NULL "
        "AND (paused_at IS NULL OR status <> 'in_progress' OR expires_at <= now()) "
        "UNION ALL SELECT id || ' (ended ' || coalesce(ended_at::text, 'no') || ')' FROM jobs WHERE gone_at IS NULL "
        "ORDER BY 1"
    )
    return [row["work"] for row in rows] + launcher.alive()


def check_end(database: Database, store: SimulatedStore, ledger: Ledger) -> dict[str, int]:
    """Check what must hold once everything is over, and return how many batches ended in which state.

    Raises:
        RuleBrokenError: a rule is broken.
    """
    rows = {
        row["id"]: row
        for row in database.look(
            "SELECT batches.*, (SELECT string_agg(code || ': ' || message, '; ') FROM batch_errors "
            "WHERE batch_id = batches.id) AS reasons FROM batches ORDER BY id"
        )
    }
    states: dict[str, int] = {}
    for batch_id, batch in ledger.batches.items():
        _check_batch(rows[batch_id], batch, ledger.answers.get(batch_id, {}), store)
        states[rows[batch_id]["status"]] = states.get(rows[batch_id]["status"], 0) + 1
    for project in sorted({batch.project for batch in ledger.batches.values()}):
        use = database.look(query("open_batches"), {"project_id": project})[0]
        if (use["batches"], use["requests"], use["tokens"]) != (0, 0, 0):
            raise RuleBrokenError(f"{project} still uses its limits: {use}")
    held = database.look(_HELD)[0]
    # A reconciler that looked before another one split the seconds of a job may record an earlier end.
    if abs(held["counted"] - held["held"]) > 0.02 * held["held"] + 1e-6:
        raise RuleBrokenError(f"jobs held GPUs for {held['held']} s, and the usage of all days has {held['counted']} s")
    if left := database.look("SELECT key AS left FROM parts UNION ALL SELECT batch_id FROM segments"):
        raise RuleBrokenError(f"records of parts or segments are left: {left}")
    if keys := store.all_keys("batches/"):
        raise RuleBrokenError(f"objects of batches are left: {keys}")
    return states


def _check_batch(row: Mapping[str, Any], batch: ClientBatch, answers: Mapping[int, int], store: SimulatedStore) -> None:
    status, total = row["status"], len(batch.requests)
    if status not in _FINAL_STATES:
        raise RuleBrokenError(f"{batch.id} is still {status}")
    if status == "failed" and "job_failed" not in (row["reasons"] or ""):
        raise RuleBrokenError(f"{batch.id} failed: {row['reasons']}")
    if status == "failed" and "assembled" in row["reasons"]:
        raise RuleBrokenError(f"{batch.id} failed: {row['reasons']}")
    if (status == "cancelled") != batch.cancelled:
        raise RuleBrokenError(
            f"{batch.id} is {status}; its client {'cancelled it' if batch.cancelled else 'did not cancel'}"
        )
    numbers = {custom_id: number for number, (custom_id, _) in enumerate(batch.requests, 1)}
    found: dict[int, int] = {}
    expired, usage = 0, Usage()
    counts = dict.fromkeys(("output", "error"), 0)
    for kind in counts:
        lines = _file_lines(row, kind, store)
        counts[kind] = len(lines)
        places = [numbers.get(line["custom_id"], 0) for line in lines]
        if 0 in places or places != sorted(set(places)):
            raise RuleBrokenError(f"the {kind} file of {batch.id} has the lines {places}")
        for number, line in zip(places, lines, strict=True):
            if line["id"] != line_id("batch_req_", batch.id, number) or number in found:
                raise RuleBrokenError(f"the {kind} file of {batch.id} has line {number} twice, or with a wrong id")
            if line["error"] is not None and status == "expired" and kind == "error":
                expired += 1
                found[number] = 0
                continue
            is_refused = "refuse" in batch.requests[number - 1][1]["messages"][0]["content"]
            body = line["response"]["body"]
            answer = json.loads(body["error"]["message"] if "error" in body else body["said"])
            if answer["hash"] != request_hash(batch.requests[number - 1][1]) or is_refused != (kind == "error"):
                raise RuleBrokenError(
                    f"line {number} of {batch.id} is in the {kind} file with the answer to another request"
                )
            found[number] = answer["number"]
            usage += Usage(input_tokens=answer["input"], output_tokens=1 + answer["number"] % 7)
    answered = {number: answer for number, answer in found.items() if answer}
    if answered != answers:
        differ = sorted(set(answered.items()) ^ set(answers.items()))
        raise RuleBrokenError(
            f"{batch.id} is {status}, and its files differ from what was committed in the lines {differ}"
        )
    if status in {"completed", "expired"} and len(found) != total:
        raise RuleBrokenError(f"{batch.id} is {status} with {len(found)} of {total} lines")
    if status == "completed" and expired:
        raise RuleBrokenError(f"{batch.id} is completed with expired lines")
    if (row["completed"], row["failed"]) != (counts["output"], counts["error"]):
        raise RuleBrokenError(f"{batch.id} counts {row['completed']} and {row['failed']}; its files have {counts}")
    if (row["input_tokens"], row["output_tokens"]) != (usage.input_tokens, usage.output_tokens):
        raise RuleBrokenError(f"{batch.id} has a usage that differs from its files: {usage}")


def _file_lines(row: Mapping[str, Any], kind: str, store: SimulatedStore) -> list[dict[str, Any]]:
    file_id = row[f"{kind}_file_id"]
    content = None if file_id is None else store.look(file_key(file_id))
    if file_id is not None and content is None:
        raise RuleBrokenError(f"the {kind} file of {row['id']} does not exist")
    return [json.loads(line) for line in (content or b"").splitlines()]
