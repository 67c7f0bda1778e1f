"""The search for a request that ends the engine."""

import asyncio
import json
from collections.abc import Sequence

from ray_job.engines.engine_process import EngineDiedError
from ray_job.engines.isolation import Answer, Isolation
from ray_job.rows import Request


class FragileEngine:
    """Dies with all it works on whenever a deadly request is among it."""

    def __init__(self, deadly: set[int], deaths_from_outside: int = 0) -> None:
        self.deadly = deadly
        self.deaths = 0
        self.runs: list[int] = []
        self._from_outside = deaths_from_outside
        self._in_flight: set[int] = set()
        self._generation = 0

    async def ask(self, request: Request) -> Answer:
        generation = self._generation
        self.runs.append(request.line)
        self._in_flight.add(request.line)
        await asyncio.sleep(0)
        if self._from_outside or self.deadly & self._in_flight:
            self._from_outside = max(0, self._from_outside - 1)
            if generation == self._generation:
                self.deaths += 1
                self._generation += 1
            self._in_flight.discard(request.line)
            raise EngineDiedError
        self._in_flight.discard(request.line)
        return 200, b"{}"


def requests(count: int, start: int = 1) -> list[Request]:
    return [
        Request(line=n, custom_id=f"r{n}", url="/v1/completions", body=b'{"model":"m"}')
        for n in range(start, start + count)
    ]


def statuses(answers: Sequence[Answer]) -> list[int]:
    return [status for status, _ in answers]


def run(engine: FragileEngine, count: int) -> list[Answer]:
    return asyncio.run(Isolation(engine.ask).answers(requests(count)))


def test_without_a_death_every_request_runs_once() -> None:
    engine = FragileEngine(deadly=set())
    assert statuses(run(engine, 20)) == [200] * 20
    assert engine.runs == list(range(1, 21))


def test_only_the_deadly_request_gets_an_error() -> None:
    engine = FragileEngine(deadly={13})
    answers = run(engine, 64)
    assert [n for n, status in enumerate(statuses(answers), start=1) if status == 500] == [13]
    error = json.loads(answers[12][1])["error"]
    assert error["code"] == "engine_died"
    assert "'m'" in error["message"]


def test_several_deadly_requests_are_all_found() -> None:
    engine = FragileEngine(deadly={1, 30, 31, 64})
    answers = run(engine, 64)
    assert [n for n, status in enumerate(statuses(answers), start=1) if status == 500] == [1, 30, 31, 64]


def test_a_death_from_outside_blames_no_request() -> None:
    engine = FragileEngine(deadly=set(), deaths_from_outside=40)
    assert statuses(run(engine, 30)) == [200] * 30


def test_two_batches_on_one_engine_do_not_blame_each_other() -> None:
    engine = FragileEngine(deadly={5})
    isolation = Isolation(engine.ask)

    async def both() -> list[list[Answer]]:
        return await asyncio.gather(isolation.answers(requests(10)), isolation.answers(requests(10, start=11)))

    first, second = asyncio.run(both())
    assert statuses(first).count(500) == 1
    assert statuses(second) == [200] * 10
