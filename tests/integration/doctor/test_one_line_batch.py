"""The doctor's batch before a server that is ill: nothing is left, or what is left is named."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from service.cli.doctor.one_line_batch import one_line_batch
from service.cli.exits import CommandError
from tests.integration.doctor.told import answering

CHAT = "/v1/chat/completions"


class Server:
    """Answers as the API, with the next of the statuses of its batch; None is an answer 503."""

    def __init__(self, *statuses: str | None, cancel: int = 200) -> None:
        self.statuses, self.cancel = list(statuses), cancel
        self.deleted: list[str] = []

    def __call__(self, verb: str, path: str) -> tuple[int, Any]:
        if verb == "DELETE":
            self.deleted.append(path.rpartition("/")[2])
            return 200, {"id": "x", "object": "file", "deleted": True}
        if path == "/v1/files":
            return 200, {"id": "file-in", "object": "file"}
        if path.endswith("/cancel"):
            return self.cancel, self.batch("cancelling") if self.cancel == 200 else {"error": {"message": "no"}}
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return (200, self.batch(status)) if status else (503, {"error": {"message": "down"}})

    def batch(self, status: str) -> dict[str, Any]:
        ended = {"output_file_id": "file-out"} if status == "completed" else {}
        return {"id": "batch_1", "object": "batch", "endpoint": CHAT, "status": status, **ended}


@contextmanager
def client_of(server: Server) -> Iterator[openai.OpenAI]:
    with answering(server) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="sk-x", max_retries=0) as client:
        yield client


def test_an_outage_while_a_batch_runs_ends_nothing() -> None:
    server = Server("in_progress", None, None, "completed")
    with client_of(server) as client, one_line_batch(client, "m", CHAT) as tried:
        assert tried.run(limit_s=30, quiet=True).status == "completed"
    assert server.deleted == ["file-in", "file-out"]


def test_a_batch_that_ends_while_it_is_cancelled_leaves_no_file() -> None:
    server = Server("in_progress", "in_progress", "completed", cancel=409)
    with client_of(server) as client, one_line_batch(client, "m", CHAT) as tried:
        tried.run(limit_s=0, quiet=True)
    assert server.deleted == ["file-in", "file-out"]


def test_a_batch_that_cannot_be_cancelled_is_named() -> None:
    server = Server("in_progress", cancel=500)
    with (
        client_of(server) as client,
        pytest.raises(CommandError, match="the batch batch_1 may still run, and the file file-in is left"),
        one_line_batch(client, "m", CHAT) as tried,
    ):
        tried.run(limit_s=0, quiet=True)


@pytest.mark.parametrize("first", [ValueError("the first error"), KeyboardInterrupt("the first error")])
def test_the_first_error_is_told_whatever_comes_after(first: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    def try_batch(client: openai.OpenAI) -> None:
        with one_line_batch(client, "m", CHAT) as tried:
            tried.run(limit_s=0, quiet=True)
            raise first

    with client_of(Server("in_progress", cancel=500)) as client, pytest.raises(type(first), match="the first error"):
        try_batch(client)
    assert "the batch batch_1 may still run, and the file file-in is left" in capsys.readouterr().err


def test_an_empty_output_is_no_answer() -> None:
    server = Server("completed")
    with (
        answering(lambda verb, path: (200, "") if path.endswith("/content") else server(verb, path)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="sk-x", max_retries=0) as client,
        one_line_batch(client, "m", CHAT) as tried,
    ):
        tried.run(limit_s=0, quiet=True)
        assert not tried.is_answered
