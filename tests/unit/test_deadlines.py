import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable

import pytest

from ray_job.engines.deadlines import (
    FACTOR,
    FLOOR_S,
    LEAST_ANSWERS,
    AnsweredLine,
    LineDeadlines,
    LineSize,
    LineTimeoutError,
    Pace,
    deadline_s,
    generated_tokens,
    measured_pace,
)

PACE = Pace(longest_s=5, s_per_token=0.05, largest_prompt=1_000, beside=8)
SIZE = LineSize(tokens=10, prompt=1_000)
CEILING_S = 20.0


def answered(seconds: float, tokens: float = 100) -> AnsweredLine:
    return AnsweredLine(tokens=tokens, prompt=10, seconds=seconds, beside=4)


def test_pace_is_unknown_before_enough_answers() -> None:
    assert measured_pace([answered(1)] * (LEAST_ANSWERS - 1)) is None
    assert deadline_s(SIZE, None) == math.inf


def test_pace_is_the_tokens_per_second_of_a_running_line() -> None:
    pace = measured_pace([answered(1), answered(4)] * LEAST_ANSWERS)
    assert pace == Pace(longest_s=4, s_per_token=0.025, largest_prompt=10, beside=4)


@pytest.mark.parametrize(
    ("size", "beside", "expected_s"),
    [
        (LineSize(tokens=1_000, prompt=500), 8, 50),
        (LineSize(tokens=1, prompt=500), 8, 5),  # it may wait in the engine for one of the longest
        (LineSize(tokens=1_000, prompt=3_000), 8, 150),
        (LineSize(tokens=1_000, prompt=500), 32, 200),
        (LineSize(tokens=1_000, prompt=500), 1, 50),
        (LineSize(tokens=math.inf, prompt=500), 8, math.inf),
    ],
)
def test_deadline_grows_with_tokens_prompt_and_lines_in_flight(size: LineSize, beside: int, expected_s: float) -> None:
    assert deadline_s(size, PACE, beside=beside) == FLOOR_S + FACTOR * expected_s


@pytest.mark.parametrize(
    ("status_code", "body", "tokens"),
    [
        (200, {"choices": [{}], "usage": {"completion_tokens": 7}}, 7),
        (200, {"choices": [{}, {}], "usage": {"completion_tokens": 8}}, 4),
        (200, {"data": [{}], "usage": {"prompt_tokens": 3}}, 1),
        (200, [], None),
        (200, {"usage": {"completion_tokens": "7"}}, None),
        (400, {"error": {}}, None),
    ],
)
def test_refused_lines_measure_nothing(status_code: int, body: object, tokens: float | None) -> None:
    assert generated_tokens(status_code, json.dumps(body)) == tokens


async def at_once() -> float:
    return 1.0


async def never() -> float:
    await asyncio.Event().wait()
    raise AssertionError


async def outcome(deadlines: LineDeadlines, ask: Callable[[], Awaitable[float]], size: LineSize = SIZE) -> str:
    try:
        await deadlines.answer(size, ask, float, ceiling_s=CEILING_S)
    except LineTimeoutError as error:
        return str(error)
    return "answered"


def run_beside(ask: Callable[[], Awaitable[float]], others: int, size: LineSize = SIZE) -> tuple[str, float]:
    """Return what became of a line that was sent before others, and its seconds."""

    async def run() -> tuple[str, float]:
        loop = asyncio.get_running_loop()
        deadlines = LineDeadlines(floor_s=0.2, check_interval_s=0.02)
        start_s = loop.time()
        line = asyncio.create_task(outcome(deadlines, ask, size))
        await asyncio.sleep(0)
        for _ in range(others):
            assert await outcome(deadlines, at_once) == "answered"
        await asyncio.wait({line}, timeout=1.2)
        done = line.done()
        line.cancel()
        return (line.result() if done else "in flight"), loop.time() - start_s

    return asyncio.run(run())


def test_line_that_hangs_fails_while_others_are_answered() -> None:
    error, _ = run_beside(never, LEAST_ANSWERS)
    assert "ran this request twice without an answer" in error


@pytest.mark.parametrize(
    ("others", "size"),
    [(LEAST_ANSWERS - 1, SIZE), (LEAST_ANSWERS, LineSize(tokens=math.inf, prompt=10))],
    ids=["too few answers", "no max_tokens"],
)
def test_line_without_a_known_deadline_is_left_to_the_ceiling(others: int, size: LineSize) -> None:
    assert run_beside(never, others, size)[0] == "in flight"


def test_line_that_is_late_once_is_answered_by_its_second_run() -> None:
    tries: list[int] = []

    async def second_time() -> float:
        tries.append(1)
        return await (never() if len(tries) == 1 else at_once())

    assert run_beside(second_time, LEAST_ANSWERS)[0] == "answered"
    assert len(tries) == 2


def test_lines_that_may_wait_in_the_engine_are_not_late() -> None:
    async def run() -> list[bool]:
        deadlines = LineDeadlines(floor_s=0.2, check_interval_s=0.02)
        for _ in range(LEAST_ANSWERS):
            await outcome(deadlines, at_once)
        lines = [asyncio.create_task(outcome(deadlines, never)) for _ in range(3)]
        await asyncio.wait({lines[0]})
        await asyncio.sleep(0)
        left = [line.done() for line in lines]
        for line in lines:
            line.cancel()
        return left

    assert asyncio.run(run()) == [True, False, False]


def test_time_stands_still_while_the_process_does() -> None:
    tries: list[int] = []

    async def slow() -> float:
        tries.append(1)
        return await asyncio.sleep(0.9, result=1.0)

    async def run() -> None:
        deadlines = LineDeadlines(floor_s=0.5, check_interval_s=0.05)
        for _ in range(LEAST_ANSWERS):
            await outcome(deadlines, at_once)
        line = asyncio.create_task(outcome(deadlines, slow))
        await asyncio.sleep(0.1)
        time.sleep(0.7)  # noqa: ASYNC251 - the process is paused
        await line

    asyncio.run(run())
    assert len(tries) == 1


def test_error_of_the_engine_is_not_a_timeout() -> None:
    async def broken() -> float:
        raise TimeoutError("the connection")

    async def run() -> None:
        with pytest.raises(TimeoutError, match="the connection"):
            await LineDeadlines().answer(SIZE, broken, float, ceiling_s=CEILING_S)

    asyncio.run(run())
