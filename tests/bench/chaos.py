"""Random kills: ``python -m tests.bench chaos``. Every line of every batch must have exactly one answer."""

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ray_job.demo_model import make_demo_model
from tests.acceptance.interruptions import KINDS, Workload, answered_ids, completed, custom_ids, kill
from tests.acceptance.local_stack import MODEL, LocalStack

SUPERVISOR: Final = "supervisor"
# Four failures of jobs in a row without a commit end the batches, so more kills wait for one.
KILLS_WITHOUT_PROGRESS: Final = 2


def main(arguments: Sequence[str]) -> int:
    """Kill random processes of a stack that runs batches; return 1 if a line is lost or doubled."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench chaos", description="Random kills on a `cloister local` that runs batches."
    )
    parser.add_argument("--kills", type=int, default=200, help="how many processes to kill")
    parser.add_argument("--lines", type=int, default=640, help="lines of a batch; one batch follows another")
    parser.add_argument("--pause-s", type=float, default=20, help="the longest pause between two kills")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of kinds and pauses")
    given = parser.parse_args(arguments)
    print(f"seed {given.seed}", flush=True)
    make_demo_model(MODEL)
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    stack = LocalStack(directory, MODEL)
    try:
        stack.start()
        workload = Workload(stack, given.lines)
        kills = _kill_at_random(stack, workload, given.kills, random.Random(given.seed), pause_s=given.pause_s)  # noqa: S311
        problems = _verify(stack, workload.batch_ids, given.lines)
    except BaseException:
        print(f"the files of the stack stay in {directory}", flush=True)
        raise
    finally:
        stack.stop()
    shutil.rmtree(directory)
    print(", ".join(f"{kind}: {count}" for kind, count in sorted(kills.items())))
    print(f"{kills.total()} kills, {len(workload.batch_ids)} batches of {given.lines} lines: {dict(problems)}")
    return 1 if problems["lost"] or problems["doubled"] else 0


def _kill_at_random(
    stack: LocalStack, workload: Workload, count: int, chance: random.Random, *, pause_s: float
) -> Counter[str]:
    """Kill processes of random kinds at random times, also while others start again, and return how many of each."""
    kills: Counter[str] = Counter()
    while kills.total() < count:
        if kills.total() % KILLS_WITHOUT_PROGRESS == 0:
            workload.wait_for_progress()
        time.sleep(chance.uniform(0, pause_s))
        kind = chance.choice([*KINDS, SUPERVISOR])
        if kind == SUPERVISOR:
            stack.kill()
            stack.start()
        elif not kill(stack, kind):  # it is starting again
            continue
        kills[kind] += 1
        print(f"kill {kills.total()} of {count}: {kind}, in batch {len(workload.batch_ids)}", flush=True)
    return kills


def _verify(stack: LocalStack, batch_ids: Sequence[str], lines: int) -> Counter[str]:
    """Wait until all batches are completed, and count their lines that are lost, doubled or wrongly refused."""
    problems = Counter(lost=0, doubled=0, blamed=0)
    for batch_id in batch_ids:
        output, errors = answered_ids(stack, completed(stack, batch_id))
        broken = custom_ids(lines, broken=True)
        found = Counter([*output, *errors])
        problems["lost"] += len({*custom_ids(lines, broken=False), *broken} - found.keys())
        problems["doubled"] += sum(times - 1 for times in found.values())
        problems["blamed"] += len(set(errors) - set(broken))
    return problems
