"""The doctor's batch on a failing server: it leaves nothing, or names what is left."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from service.client.exit_codes import CommandError
from service.doctor.api import OneLineBatch
from tests.integration.doctor.doctor_run import http_server

CHAT = "/v1/chat/completions"


class Server:
    """An API whose batch has the given statuses, one for each request; None is a 503."""

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
    with http_server(server) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="sk-x", max_retries=0) as client:
        yield client


def test_batch_survives_an_outage() -> None:
    server = Server("in_progress", None, None, "completed")
    with client_of(server) as client, OneLineBatch(client, "m", CHAT) as trial:
        assert trial.run(time_limit_s=30, quiet=True).status == "completed"
    assert server.deleted == ["file-in", "file-out"]


def test_batch_that_ends_during_its_cancellation_leaves_no_file() -> None:
    server = Server("in_progress", "in_progress", "completed", cancel=409)
    with client_of(server) as client, OneLineBatch(client, "m", CHAT) as trial:
        trial.run(time_limit_s=0, quiet=True)
    assert server.deleted == ["file-in", "file-out"]


def test_batch_that_cannot_be_cancelled_is_named() -> None:
    server = Server("in_progress", cancel=500)
    with (
        client_of(server) as client,
        pytest.raises(CommandError, match="the batch batch_1 may still run, and the file file-in is left"),
        OneLineBatch(client, "m", CHAT) as trial,
    ):
        trial.run(time_limit_s=0, quiet=True)


@pytest.mark.parametrize("first", [ValueError("the first error"), KeyboardInterrupt("the first error")])
def test_first_error_takes_precedence_over_errors_of_the_cleanup(
    first: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    def try_batch(client: openai.OpenAI) -> None:
        with OneLineBatch(client, "m", CHAT) as trial:
            trial.run(time_limit_s=0, quiet=True)
            raise first

    with client_of(Server("in_progress", cancel=500)) as client, pytest.raises(type(first), match="the first error"):
        try_batch(client)
    assert "the batch batch_1 may still run, and the file file-in is left" in capsys.readouterr().err


def test_empty_output_has_no_line() -> None:
    server = Server("completed")
    with (
        http_server(lambda verb, path: (200, "") if path.endswith("/content") else server(verb, path)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="sk-x", max_retries=0) as client,
        OneLineBatch(client, "m", CHAT) as trial,
    ):
        trial.run(time_limit_s=0, quiet=True)
        assert not trial.has_output
