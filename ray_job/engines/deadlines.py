"""Deadlines of lines, from the tokens that they may generate and the measured pace of their engine.

A line that hangs in its engine ends long before the model's ``request_timeout_s``, and no line ends because its engine
or its machine is slow:

- An engine is measured first, on lines that it answered. A line may take ten times as long as these answers suggest,
  and a minute.
- The time of a line counts from when the engine is known to run it: when it has answered a line that was sent later, or
  when all lines sent earlier are answered. Engines begin lines in the order in which they were sent. Source:
  https://docs.vllm.ai/en/stable/api/vllm/config/scheduler/ (``policy``: ``fcfs``).
- The time stands still while the process that counts it does, for example on a machine that is paused.
- More lines in flight make each of them slower, and so its deadline later.
- A line that exceeds its deadline runs once more, and fails if it exceeds it again.
"""

import asyncio
import itertools
import json
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, TypeVar

FLOOR_S: Final = 60.0
"""No deadline is shorter. It covers a slow first step, such as the compilation of a grammar or a kernel."""
FACTOR: Final = 10
"""How many times as long as expected a line may take."""
LEAST_ANSWERS: Final = 16
RECENT_ANSWERS: Final = 256
TRIES: Final = 2
CHECK_INTERVAL_S: Final = 1.0


T = TypeVar("T")


class LineTimeoutError(Exception):
    """A line that its engine did not answer in time. The message is for the owner of the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSize:
    """Sizes of a line on which its time depends.

    Attributes:
        tokens: the most tokens that it generates; infinite if it has no limit.
        prompt: the size of its prompt or its body, in the same unit for all lines of an engine.
    """

    tokens: float
    prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredLine:
    """A line that the engine answered.

    Attributes:
        tokens: tokens that it generated for each choice.
        prompt: see ``LineSize``.
        seconds: from when it was sent to its answer.
        beside: lines in flight at its answer, with itself.
    """

    tokens: float
    prompt: int
    seconds: float
    beside: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The pace of an engine.

    Attributes:
        longest_s: the longest time of an answer.
        s_per_token: seconds of a running line per generated token.
        largest_prompt: the largest prompt that was answered.
        beside: lines in flight, on average.
    """

    longest_s: float
    s_per_token: float
    largest_prompt: int
    beside: float


def measured_pace(answered: Sequence[AnsweredLine]) -> Pace | None:
    """Return the pace of an engine, or None before it has answered enough lines."""
    if len(answered) < LEAST_ANSWERS:
        return None
    return Pace(
        longest_s=max(each.seconds for each in answered),
        s_per_token=sum(each.seconds for each in answered) / sum(each.tokens for each in answered),
        largest_prompt=max(each.prompt for each in answered),
        beside=sum(each.beside for each in answered) / len(answered),
    )


def deadline_s(line: LineSize, pace: Pace | None, *, beside: int = 1, floor_s: float = FLOOR_S) -> float:
    """Return how long an engine may run a line; infinite if that is unknown.

    Args:
        line: the line.
        pace: the pace of the engine, if it is known.
        beside: the most lines that were in flight during its time, with itself.
        floor_s: added to the expected time.
    """
    if pace is None:
        return math.inf
    expected_s = max(pace.longest_s, line.tokens * pace.s_per_token)
    larger = max(1.0, line.prompt / max(1, pace.largest_prompt))
    slower = max(1.0, beside / pace.beside)
    return floor_s + FACTOR * expected_s * larger * slower


def generated_tokens(status_code: int, body: str | bytes) -> float | None:
    """Return the tokens of each choice of a response, at least 1; None if the engine refused the line.

    Args:
        status_code: the HTTP status.
        body: the body of the response.
    """
    if status_code != HTTPStatus.OK:
        return None
    try:
        parsed = json.loads(body)
        tokens = (parsed.get("usage") or {}).get("completion_tokens") or 0
        return max(1.0, float(tokens / max(1, len(parsed.get("choices") or ()))))
    except (ValueError, TypeError, AttributeError):
        return None


@dataclass(slots=True, kw_only=True)
class _LineInFlight:
    size: LineSize
    limit: asyncio.Timeout
    beside: int = 1
    running_s: float = 0.0
    deadline_s: float = math.inf
    is_late: bool = False


class LineDeadlines:
    """The deadlines of the lines of one engine. It can be pickled before its first line.

    Args:
        floor_s: see ``deadline_s``.
        check_interval_s: how often lines in flight are compared with their deadlines, in seconds.
    """

    def __init__(self, *, floor_s: float = FLOOR_S, check_interval_s: float = CHECK_INTERVAL_S) -> None:
        self._floor_s = floor_s
        self._check_interval_s = check_interval_s
        self._answered: deque[AnsweredLine] = deque(maxlen=RECENT_ANSWERS)
        self._numbers = itertools.count()
        self._newest_answered = -1
        self._in_flight: dict[int, _LineInFlight] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._checked_s = 0.0

    async def answer(
        self, size: LineSize, ask: Callable[[], Awaitable[T]], tokens: Callable[[T], float | None], *, ceiling_s: float
    ) -> T:
        """Send a line to the engine and return its answer. A line that is late is cancelled, and sent once more.

        Args:
            size: the size of the line.
            ask: sends the line. It is cancelled when the line is late.
            tokens: returns the tokens of an answer; see ``generated_tokens``.
            ceiling_s: how long the line may take in all, also before its engine is measured.

        Raises:
            LineTimeoutError: the engine did not answer in time.
        """
        ends_s = asyncio.get_running_loop().time() + ceiling_s
        for _ in range(TRIES):
            line = _LineInFlight(size=size, limit=asyncio.timeout_at(ends_s))
            try:
                async with line.limit:
                    return await self._ask(line, ask, tokens)
            except TimeoutError:
                if not line.limit.expired():
                    raise
            if not line.is_late:
                raise LineTimeoutError(ceiling_message(ceiling_s))
        raise LineTimeoutError(deadline_message(line.deadline_s))

    async def _ask(
        self, line: _LineInFlight, ask: Callable[[], Awaitable[T]], tokens: Callable[[T], float | None]
    ) -> T:
        """Send a line, and measure its answer."""
        loop = asyncio.get_running_loop()
        number, sent_s = next(self._numbers), loop.time()
        if self._timer is None:
            self._checked_s = sent_s
            self._timer = loop.call_later(self._check_interval_s, self._check, loop)
        self._in_flight[number] = line
        try:
            answer = await ask()
        finally:
            beside = len(self._in_flight)
            del self._in_flight[number]
        if (generated := tokens(answer)) is not None:
            seconds = loop.time() - sent_s
            self._answered.append(
                AnsweredLine(tokens=generated, prompt=line.size.prompt, seconds=seconds, beside=beside)
            )
            self._newest_answered = max(self._newest_answered, number)
        return answer

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the lines that are late."""
        self._timer = None
        if not self._in_flight:
            return
        now_s = loop.time()
        elapsed_s, self._checked_s = min(now_s - self._checked_s, 2 * self._check_interval_s), now_s
        pace, oldest = measured_pace(self._answered), next(iter(self._in_flight))
        for number, line in self._in_flight.items():
            line.beside = max(line.beside, len(self._in_flight))
            if number > self._newest_answered and number != oldest:
                continue  # it may wait in the engine
            line.running_s += elapsed_s
            line.deadline_s = deadline_s(line.size, pace, beside=line.beside, floor_s=self._floor_s)
            if line.running_s > line.deadline_s and not line.limit.expired():
                line.is_late = True
                line.limit.reschedule(now_s)
        self._timer = loop.call_later(self._check_interval_s, self._check, loop)


def ceiling_message(timeout_s: float) -> str:
    """Return the error of a line that took longer than the model allows."""
    return (
        f"The engine did not answer this request within {timeout_s:,g} s. Lower max_tokens, or have request_timeout_s "
        "of the model raised, and send the line again."
    )


def deadline_message(timeout_s: float) -> str:
    """Return the error of a line that exceeded its deadline twice."""
    return (
        f"The engine ran this request twice without an answer, each time for {timeout_s:,.0f} s, {FACTOR} times as "
        "long as max_tokens take there. Leave out unusual sampling parameters, shorten the prompt or lower max_tokens, "
        "and send the line again."
    )
