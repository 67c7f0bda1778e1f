"""Errors of input files."""

import itertools
from typing import Any

import openai
import pytest

from tests.conformance.bad_files import BAD_FILES, BAD_LINES, MANY, UNCONFIRMED_LINES, Expected
from tests.conformance.prepared import Prepared
from tests.conformance.target import Target, Watched
from tests.conformance.workload import chat, jsonl

pytestmark = pytest.mark.point("V2")


def errors_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    assert batch["status"] == "failed"
    errors: list[dict[str, Any]] = batch["errors"]["data"]
    return errors


def comparable(errors: list[dict[str, Any]], expected: tuple[Expected, ...]) -> list[Expected]:
    """Return the reported errors, reduced to the fields that the expected errors specify."""
    return [
        Expected(
            line=error.get("line"),
            code=error["code"] if wanted is None or wanted.code else None,
            field=str(error.get("param")).split(".")[-1] if wanted is not None and wanted.field else None,
        )
        for error, wanted in zip(errors, (*expected, *[None] * len(errors)), strict=False)
    ]


def assert_reported(prepared: Prepared, name: str) -> None:
    expected = BAD_FILES[name].errors
    assert comparable(errors_of(prepared.batch(name).ended()), expected) == list(expected)


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_reported_with_its_number_and_code(prepared: Prepared, name: str) -> None:
    assert_reported(prepared, name)


@pytest.mark.point("V3")
@pytest.mark.parametrize("name", UNCONFIRMED_LINES)
def test_another_bad_line_is_reported_with_its_number_and_code(prepared: Prepared, name: str) -> None:
    assert_reported(prepared, name)


@pytest.mark.point("V3")
def test_two_models_in_one_file_are_reported(target: Target, client: openai.OpenAI) -> None:
    others = [model.id for model in client.models.list() if model.id != target.model]
    if not others:
        pytest.skip("the server has only one model")
    content = jsonl([chat("a", target.model), chat("b", others[0])])
    file = client.files.create(file=("two.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    errors = errors_of(Watched(client=client, id=batch.id, timeout_s=target.timeout_s).ended())
    assert ("model_mismatch", 2) in [(error["code"], error["line"]) for error in errors]


@pytest.mark.point("V1")
def test_all_bad_lines_are_reported_at_once(prepared: Prepared) -> None:
    assert_reported(prepared, "seven kinds")


@pytest.mark.point("V1")
def test_hundreds_of_bad_lines_are_reported_in_order(prepared: Prepared) -> None:
    errors = errors_of(prepared.batch("many").ended())
    assert [error["line"] for error in errors] == [1 + 2 * number for number in range(MANY)]


@pytest.mark.point("V1")
def test_line_numbers_count_blank_lines(prepared: Prepared) -> None:
    assert_reported(prepared, "after blank lines")


@pytest.mark.point("V1")
def test_errors_are_a_list_object(failed: dict[str, Any]) -> None:
    assert failed["errors"]["object"] == "list"


@pytest.mark.point("V1")
@pytest.mark.parametrize("field", ["code", "message"])
def test_every_error_has_a(failed: dict[str, Any], field: str) -> None:
    assert [error for error in errors_of(failed) if not isinstance(error[field], str) or not error[field]] == []


@pytest.mark.point("V1")
@pytest.mark.parametrize("field", ["param", "line"])
def test_every_error_has_the_field(failed: dict[str, Any], field: str) -> None:
    assert [error for error in errors_of(failed) if field not in error] == []


@pytest.mark.point("V1")
def test_a_listing_contains_the_errors(client: openai.OpenAI, failed: dict[str, Any]) -> None:
    for batch in itertools.islice(client.batches.list(limit=100), 500):
        if batch.id == failed["id"]:
            assert batch.to_dict()["errors"] == failed["errors"]
            return
    pytest.fail("the batch is not listed")


def refused_or_failed(prepared: Prepared, name: str) -> list[dict[str, Any]]:
    """Return the errors of a file that the server may refuse at upload."""
    refusal = prepared.refusals.get(name)
    if refusal is None:
        return errors_of(prepared.batch(name).ended())
    assert isinstance(refusal, openai.BadRequestError)
    return [{"code": refusal.code, "message": refusal.message, "param": refusal.param}]


@pytest.mark.point("U5")
@pytest.mark.parametrize("name", ["gzip", "a JSON array", "UTF-16", "CSV"])
def test_a_file_that_is_not_jsonl_is_refused_or_fails(prepared: Prepared, name: str) -> None:
    assert len(refused_or_failed(prepared, name)) > 0


@pytest.mark.point("V3")
@pytest.mark.parametrize("name", ["nothing", "blank lines"])
def test_a_file_without_a_request_is_refused_or_fails(prepared: Prepared, name: str) -> None:
    errors = refused_or_failed(prepared, name)
    assert len(errors) == 1
    if name not in prepared.refusals:
        assert (errors[0]["code"], errors[0]["line"]) == ("empty_file", None)


@pytest.mark.point("V4")
def test_more_than_50_000_requests_are_refused(prepared: Prepared) -> None:
    errors = errors_of(prepared.batch("50,001 requests").ended())
    assert [error for error in errors if "50,000" in error["message"] or "50000" in error["message"]] != []


@pytest.mark.point("V4")
def test_more_than_50_000_embedding_inputs_are_refused(prepared: Prepared) -> None:
    errors = errors_of(prepared.batch("too many inputs").ended())
    assert [error for error in errors if "50,000" in error["message"] or "50000" in error["message"]] != []


@pytest.mark.point("V5")
def test_byte_order_mark_crlf_and_blank_lines_pass_validation(stopped: Watched) -> None:
    seen = stopped.look()
    assert (seen["status"] == "failed", seen.get("errors")) == (False, None)


@pytest.mark.point("V5")
def test_blank_lines_are_not_counted_as_requests(stopped: Watched) -> None:
    assert stopped.look()["request_counts"]["total"] == 3
