"""Output and error files, and their lines."""

import asyncio
from typing import Any

import openai
import pytest

from tests.conformance.prepared import COMPLETION_LINES, EMBEDDING_INPUTS, OUTPUT_EXPIRES_AFTER_S
from tests.conformance.target import Target
from tests.conformance.workload import Workload

pytestmark = [pytest.mark.point("O1"), pytest.mark.late]

Lines = list[dict[str, Any]]


def by_id(lines: Lines) -> dict[str, dict[str, Any]]:
    return {row["custom_id"]: row for row in lines}


def test_a_line_has_the_four_fields(output: Lines) -> None:
    assert {tuple(sorted(row)) for row in output} == {("custom_id", "error", "id", "response")}


def test_line_ids_start_with_batch_req(output: Lines, errors: Lines) -> None:
    assert {row["id"][:10] for row in output + errors} == {"batch_req_"}


def test_line_ids_are_unique(output: Lines, errors: Lines) -> None:
    ids = [row["id"] for row in output + errors]
    assert len(set(ids)) == len(ids)


def test_a_response_has_status_request_id_and_body(output: Lines) -> None:
    assert {tuple(sorted(row["response"])) for row in output} == {("body", "request_id", "status_code")}


def test_the_output_file_has_status_200_only(output: Lines) -> None:
    assert {row["response"]["status_code"] for row in output} == {200}


def test_the_output_file_has_no_errors(output: Lines) -> None:
    assert [row["error"] for row in output if row["error"] is not None] == []


def test_request_ids_are_strings_and_unique(output: Lines) -> None:
    ids = [row["response"]["request_id"] for row in output]
    assert {type(request_id) for request_id in ids} == {str}
    assert len(set(ids)) == len(ids)


@pytest.mark.point("O3")
def test_every_answered_request_has_one_line_in_the_output_file(output: Lines, workload: Workload) -> None:
    assert sorted(row["custom_id"] for row in output) == sorted(workload.answered)


@pytest.mark.point("O3")
def test_every_refused_request_has_one_line_in_the_error_file(errors: Lines, workload: Workload) -> None:
    assert sorted(row["custom_id"] for row in errors) == sorted(workload.refused)


@pytest.mark.point("O3")
def test_unusual_custom_ids_are_returned_unchanged(output: Lines, workload: Workload) -> None:
    unusual = {name for name in workload.answered if not name.isalnum()}
    assert unusual - by_id(output).keys() == set()


@pytest.mark.point("O2")
def test_the_error_file_has_client_errors_only(errors: Lines) -> None:
    assert {row["response"]["status_code"] // 100 for row in errors} == {4}


@pytest.mark.point("O2")
def test_an_http_error_is_in_the_body_and_error_is_null(errors: Lines) -> None:
    assert [row["error"] for row in errors if row["error"] is not None] == []


@pytest.mark.point("O2")
@pytest.mark.parametrize("field", ["message", "type", "param", "code"])
def test_the_error_of_a_refused_row_has(errors: Lines, field: str) -> None:
    assert [row for row in errors if field not in row["response"]["body"]["error"]] == []


@pytest.mark.point("O2")
def test_the_error_of_a_refused_row_has_a_text_message(errors: Lines) -> None:
    assert {type(row["response"]["body"]["error"]["message"]) for row in errors} == {str}


@pytest.mark.point("O2")
def test_the_error_file_has_all_rows_if_all_fail(client: openai.OpenAI, all_refused: dict[str, Any]) -> None:
    assert client.files.content(all_refused["error_file_id"]).text.count("\n") == 2


@pytest.mark.point("O5")
@pytest.mark.parametrize("field", ["id", "object", "created", "model", "choices", "usage"])
def test_a_chat_completion_has(output: Lines, field: str) -> None:
    assert [row for row in output if row["response"]["body"].get(field) is None] == []


@pytest.mark.point("O5")
def test_the_body_is_a_chat_completion(output: Lines) -> None:
    assert {row["response"]["body"]["object"] for row in output} == {"chat.completion"}


@pytest.mark.point("O5")
def test_every_choice_is_a_message_of_the_assistant(output: Lines) -> None:
    messages = [choice["message"] for row in output for choice in row["response"]["body"]["choices"]]
    assert {(message["role"], type(message["content"])) for message in messages} == {("assistant", str)}


@pytest.mark.point("O5")
def test_every_choice_has_a_finish_reason(output: Lines) -> None:
    reasons = {choice["finish_reason"] for row in output for choice in row["response"]["body"]["choices"]}
    assert reasons <= {"stop", "length"}


@pytest.mark.point("O5")
def test_a_request_for_two_choices_gets_two(output: Lines) -> None:
    choices = by_id(output)["two choices"]["response"]["body"]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]


@pytest.mark.point("O5")
def test_a_request_for_one_token_gets_one(output: Lines) -> None:
    assert by_id(output)["one token"]["response"]["body"]["usage"]["completion_tokens"] == 1


@pytest.mark.point("O5")
def test_the_official_types_accept_a_body(output: Lines) -> None:
    from openai.types.chat import ChatCompletion

    parsed = [ChatCompletion.model_validate(row["response"]["body"]) for row in output]
    assert len(parsed) == len(output)


@pytest.mark.point("O4")
@pytest.mark.parametrize("name", ["output_file_id", "error_file_id"])
def test_the_file_has_purpose_batch_output(client: openai.OpenAI, main: dict[str, Any], name: str) -> None:
    file = client.files.retrieve(main[name])
    assert (file.purpose, file.status) == ("batch_output", "processed")


@pytest.mark.point("O4")
@pytest.mark.parametrize("name", ["output_file_id", "error_file_id"])
def test_the_file_has_the_requested_expiry(client: openai.OpenAI, main: dict[str, Any], name: str) -> None:
    file = client.files.retrieve(main[name])
    assert file.expires_at == file.created_at + OUTPUT_EXPIRES_AFTER_S


@pytest.mark.point("O4")
@pytest.mark.parametrize("name", ["output_file_id", "error_file_id"])
def test_the_file_has_the_size_of_its_object(client: openai.OpenAI, main: dict[str, Any], name: str) -> None:
    assert len(client.files.content(main[name]).read()) == client.files.retrieve(main[name]).bytes


@pytest.mark.point("O4")
def test_output_files_can_be_listed_by_purpose(client: openai.OpenAI, main: dict[str, Any]) -> None:
    listed = client.files.list(purpose="batch_output", limit=100).data
    assert {file.purpose for file in listed} == {"batch_output"}
    assert {main["output_file_id"], main["error_file_id"]} - {file.id for file in listed} == set()


@pytest.mark.point("O4")
def test_the_name_of_the_output_file_ends_with_jsonl(client: openai.OpenAI, main: dict[str, Any]) -> None:
    assert client.files.retrieve(main["output_file_id"]).filename[-6:] == ".jsonl"


@pytest.mark.point("O4")
def test_the_async_client_reads_the_output(target: Target, main: dict[str, Any], output: Lines) -> None:
    async def read() -> int:
        async with target.async_client() as client:
            return len((await client.files.content(main["output_file_id"])).text.strip().split("\n"))

    assert asyncio.run(read()) == len(output)


@pytest.mark.point("F2")
def test_the_input_file_is_unchanged(client: openai.OpenAI, main: dict[str, Any], workload: Workload) -> None:
    assert client.files.content(main["input_file_id"]).read() == workload.content


@pytest.mark.point("O5")
def test_the_body_of_a_completion_has_text(completions: Lines) -> None:
    bodies = [row["response"]["body"] for row in completions]
    assert [body["object"] for body in bodies] == ["text_completion"] * COMPLETION_LINES
    assert {type(choice["text"]) for body in bodies for choice in body["choices"]} == {str}


@pytest.mark.point("O5")
def test_the_body_of_an_embedding_has_one_vector_per_input(embeddings: Lines) -> None:
    data = by_id(embeddings)["several"]["response"]["body"]["data"]
    assert [item["index"] for item in data] == list(range(len(EMBEDDING_INPUTS)))
    assert {(item["object"], type(item["embedding"][0])) for item in data} == {("embedding", float)}


@pytest.mark.point("O5")
def test_a_single_embedding_input_has_one_vector(embeddings: Lines) -> None:
    body = by_id(embeddings)["single"]["response"]["body"]
    assert (body["object"], len(body["data"])) == ("list", 1)
