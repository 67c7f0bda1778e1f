"""The window of rows of one engine, and isolation of a row that ends the engine."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ray_job.contract.leases import SegmentRef
from ray_job.engines import row_window
from ray_job.engines.engine_process import EngineDiedError
from ray_job.engines.row_window import Answer, RowWindow, first_step
from ray_job.errors import EngineUnavailableError
from ray_job.rows import Request


class FragileEngine:
    """An engine that dies when a deadly request is in flight, with all other requests in flight."""

    def __init__(self, deadly: Sequence[int] = (), external_deaths: int = 0, *, late: bool = False) -> None:
        self.deaths = 0
        self.restarts = 0
        self.runs: list[int] = []
        self.most_in_flight = 0
        self._deadly = set(deadly)
        self._late = late  # deadly requests kill it after their first step
        self._external_deaths = external_deaths
        self._in_flight: set[int] = set()
        self._dead = False

    async def ask(self, request: Request) -> Answer:
        self.runs.append(request.line)
        if not (self._late and json.loads(request.body).get("max_tokens") == 1):
            self._in_flight.add(request.line)
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        for _ in range(50):  # long enough for others to be sent
            await asyncio.sleep(0)
        if not self._dead and (self._external_deaths or self._deadly & self._in_flight):
            self._external_deaths = max(0, self._external_deaths - 1)
            self.deaths += 1
            self._dead = True
        self._in_flight.discard(request.line)
        if self._dead:
            raise EngineDiedError
        return 200, b"{}"

    async def restart(self) -> None:
        self.restarts += 1
        self._dead = False


SEGMENT = SegmentRef(batch_id="batch_1", segment=0, epoch=1)


def request(line: int, body: bytes = b'{"model":"m"}', url: str = "/v1/completions", segment: int = 0) -> Request:
    ref = replace(SEGMENT, segment=segment)
    return Request(segment=ref, row=line, line=line, custom_id=f"r{line}", url=url, body=body)


def requests(count: int, body: bytes = b'{"model":"m"}') -> list[Request]:
    return [request(n, body) for n in range(1, count + 1)]


def run(
    engine: FragileEngine, rows: Sequence[Request], *, window: int = 64, sequences: int = 64, lost: Sequence[int] = ()
) -> dict[int, Answer]:
    """Answer rows; the segments that are lost are dropped once their rows are in the window."""
    answers: dict[int, Answer] = {}
    segments = {replace(SEGMENT, segment=each) for each in lost}
    kept = {row.line for row in rows if row.segment not in segments}
    done = asyncio.Event()

    async def finish(request: Request, answer: Answer) -> None:
        assert request.line not in answers
        answers[request.line] = answer
        if kept <= answers.keys():
            done.set()

    async def answer_all() -> None:
        opened = RowWindow(engine, finish, rows=window, sequences=sequences, ahead=16)
        working = asyncio.create_task(opened.run())
        for start in range(0, len(rows), 16):
            adding = asyncio.create_task(opened.add(rows[start : start + 16]))
            await asyncio.wait({adding, working}, return_when=asyncio.FIRST_COMPLETED)
        await opened.drop(segments)
        finished = asyncio.create_task(done.wait())
        await asyncio.wait({finished, working}, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        working.cancel()
        await asyncio.wait({working})
        if not working.cancelled():
            working.result()
        assert done.is_set()

    asyncio.run(answer_all())
    return answers


def refused(answers: dict[int, Answer]) -> list[int]:
    return sorted(line for line, (status, _) in answers.items() if status == 500)


def test_every_row_runs_once_while_the_engine_lives() -> None:
    engine = FragileEngine()
    assert sorted(run(engine, requests(200))) == list(range(1, 201))
    assert engine.runs == list(range(1, 201))


def test_window_is_filled_and_never_exceeded() -> None:
    engine = FragileEngine()
    run(engine, requests(200), window=40)
    assert engine.most_in_flight == 40


def test_large_rows_limit_the_window_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_window, "MAX_BYTES", 100)
    engine = FragileEngine()
    run(engine, requests(20, body=b'"' + b"x" * 38 + b'"'), window=40)
    assert engine.most_in_flight == 2


def test_row_above_the_limit_of_bytes_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_window, "MAX_BYTES", 10)
    engine = FragileEngine()
    assert len(run(engine, requests(5))) == 5
    assert engine.most_in_flight == 1


@pytest.mark.parametrize("late", [False, True])
def test_only_the_deadly_row_gets_an_error(late: bool) -> None:
    engine = FragileEngine(deadly=[131], late=late)
    answers = run(engine, requests(500))
    assert len(answers) == 500
    assert refused(answers) == [131]
    error = json.loads(answers[131][1])["error"]
    assert error["code"] == "engine_died"
    assert "'m'" in error["message"]


@pytest.mark.parametrize(("late", "most"), [(False, 2), (True, 6)])
def test_deadly_row_costs_few_restarts(late: bool, most: int) -> None:
    engine = FragileEngine(deadly=[300], late=late)
    run(engine, requests(1_000), window=512)
    assert engine.restarts <= most


def test_rows_that_waited_inside_the_engine_are_suspected_last() -> None:
    engine = FragileEngine(deadly=[8])
    run(engine, requests(12), window=12, sequences=8)
    assert engine.runs[:14] == [*range(1, 13), 8, 1]  # 8 is the newest of the eight that could run
    engine = FragileEngine(external_deaths=1)
    run(engine, requests(4), window=4, sequences=3)
    assert engine.runs[:8] == [1, 2, 3, 4, 3, 2, 1, 4]


@pytest.mark.parametrize("late", [False, True])
def test_several_deadly_rows_are_found(late: bool) -> None:
    answers = run(FragileEngine(deadly=[1, 30, 31, 64], late=late), requests(64))
    assert refused(answers) == [1, 30, 31, 64]


def test_suspects_that_take_too_long_alone_are_found_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_window, "PROBE_TIME_S", -1)
    answers = run(FragileEngine(deadly=[12]), requests(64))
    assert refused(answers) == [12]


@pytest.mark.parametrize(
    ("url", "body", "sent"),
    [
        ("/v1/completions", {"min_tokens": 3, "n": 2}, {"n": 2, "max_tokens": 1, "max_completion_tokens": 1}),
        ("/v1/embeddings", {"input": "x"}, {"input": "x"}),
    ],
)
def test_first_step_generates_one_token(url: str, body: dict[str, object], sent: dict[str, object]) -> None:
    assert json.loads(first_step(request(1, json.dumps(body).encode(), url))) == sent


def test_rows_of_a_lost_segment_are_cancelled() -> None:
    rows = [request(line, segment=line % 2) for line in range(1, 21)]
    engine = FragileEngine(deadly=[3])
    answers = run(engine, rows, window=8, lost=[1])
    assert sorted(answers) == list(range(2, 21, 2))


def test_deadly_row_is_isolated_although_rows_never_stop_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_window, "ISOLATE_WITHIN_S", -1)
    engine = FragileEngine(deadly=[5])
    assert refused(run(engine, requests(300), window=8)) == [5]
    assert engine.runs.index(300) > max(index for index, line in enumerate(engine.runs) if line == 5)


def test_external_death_blames_no_row() -> None:
    engine = FragileEngine(external_deaths=2)
    answers = run(engine, requests(30))
    assert len(answers) == 30
    assert refused(answers) == []
    assert engine.restarts == 2


def test_engine_that_does_not_start_again_ends_the_run() -> None:
    class BrokenEngine(FragileEngine):
        async def restart(self) -> None:
            raise EngineUnavailableError("no memory left")

    with pytest.raises(EngineUnavailableError, match="no memory left"):
        run(BrokenEngine(external_deaths=1), requests(3))


def test_unexpected_error_ends_the_run() -> None:
    class BrokenEngine(FragileEngine):
        async def ask(self, request: Request) -> Answer:
            raise KeyError(request.line)

    with pytest.raises(KeyError):
        run(BrokenEngine(), requests(10))
