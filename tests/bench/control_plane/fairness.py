"""Shares of two busy projects in one job: ``python -m tests.bench fairness``.

Projects that do not share jobs have engines of their own, as many as their backlog needs; what they have in common is
the job slots, which take turns (``service.job_transitions.TURN``).
"""

import argparse
import json
import time
from collections.abc import Sequence

import httpx
import openai

from service.api_keys import create_api_key
from service.db import open_pool
from service.projects import create_project
from tests.bench.control_plane.run import memory_directory
from tests.bench.control_plane.stack import MODEL, Load, LoadedStack, running_stack

# One project has a few large batches of long lines, the other one many small batches of short lines.
PROJECTS = {"large": (4, 20_000, 120), "small": (60, 1_000, 10)}
MOST_DIFFERENCE = 0.1


def main(arguments: Sequence[str]) -> int:
    """Let two projects compete, print the tokens of each, and return 1 if their shares differ too much."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench fairness", description="Two busy projects that share a simulated job."
    )
    parser.add_argument("--seconds", type=float, default=300, help="how long to measure")
    parser.add_argument("--rows-per-s", type=float, default=100, help="the rate of the job")
    given = parser.parse_args(arguments)
    load = Load(live=1, queued=0, rows_per_s=given.rows_per_s, commit_every_s=1.0, sharing="stack")
    with memory_directory() as directory, running_stack(load, directory) as stack:
        row_tokens = {name: _create_batches(stack, name, *sizes) for name, sizes in PROJECTS.items()}
        before = _answered(stack)
        time.sleep(given.seconds)
        after = _answered(stack)
        left = stack.sql(
            "SELECT name FROM projects JOIN batches ON project_id = projects.id WHERE completed_at IS NULL"
        )
    tokens = {name: (after[name] - before[name]) * row_tokens[name] for name in PROJECTS}
    if {name for (name,) in left} != set(PROJECTS):
        raise RuntimeError("a project ran out of work; measure for less time, or with a lower rate")
    mean = sum(tokens.values()) / len(tokens)
    difference = max(abs(count - mean) for count in tokens.values()) / mean
    for name, count in tokens.items():
        print(f"{name}: {count:,.0f} tokens, {after[name] - before[name]:,} lines")
    verdict = "pass" if difference <= MOST_DIFFERENCE else "fail"
    print(
        f"{verdict}: {given.seconds:.0f} s: the shares differ from their mean by "
        f"{100 * difference:.1f} % (at most {100 * MOST_DIFFERENCE:g} %)"
    )
    return int(verdict == "fail")


def _create_batches(stack: LoadedStack, name: str, count: int, lines: int, words: int) -> float:
    """Create a project with batches of one file, and return the planned tokens of one of its lines."""
    with open_pool(stack.database_url, max_size=1) as pool:
        project = create_project(pool, name)
        key = create_api_key(pool, project_id=project.id, name=name)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "word " * words}], "max_tokens": 2 * words}
    request = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    content = b"".join(json.dumps({"custom_id": f"id-{number}", **request}).encode() + b"\n" for number in range(lines))
    with httpx.Client(trust_env=False) as http:
        client = openai.OpenAI(base_url=stack.base_url, api_key=key, http_client=http)
        file = client.files.create(file=(f"{name}.jsonl", content), purpose="batch")
        for _ in range(count):
            client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    planned = "SELECT sum(tokens)::float / sum(rows) FROM segments JOIN batches ON id = batch_id WHERE project_id = %s"
    while (tokens := stack.sql(planned, [project.id])[0][0]) is None:
        time.sleep(0.1)
    return float(tokens)


def _answered(stack: LoadedStack) -> dict[str, int]:
    return dict(
        stack.sql("SELECT name, sum(completed)::int FROM projects JOIN batches ON project_id = projects.id GROUP BY 1")
    )
