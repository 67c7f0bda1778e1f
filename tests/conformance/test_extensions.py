"""cloister's extensions of the contract."""

import itertools
import json
import secrets
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.bad_files import NO_JSONL
from tests.conformance.prepared import Prepared
from tests.conformance.target import Target, Watched
from tests.conformance.test_batches import REQUEST
from tests.conformance.workload import CHAT, Workload, chat, jsonl

Lines = list[dict[str, Any]]
Events = list[dict[str, str]]
late = pytest.mark.late
LISTED_AT_MOST = 1_000
# Other clients may use the project at the same time: their files appear between those of the suite.
PAGED_AT_MOST = 50


@late
@pytest.mark.point("X1")
def test_results_are_in_input_order(output: Lines, errors: Lines, workload: Workload) -> None:
    assert [row["custom_id"] for row in output] == list(workload.answered)
    assert [row["custom_id"] for row in errors] == list(workload.refused)


def create(http: httpx.Client, key: str, **changes: Any) -> httpx.Response:
    return http.post("batches", json={**REQUEST, **changes}, headers={"idempotency-key": key})


@pytest.mark.point("X2")
def test_creations_with_the_same_idempotency_key_make_one_batch(http: httpx.Client) -> None:
    key = secrets.token_hex()
    assert create(http, key).json()["id"] == create(http, key).json()["id"]


@pytest.mark.point("X2")
def test_creations_with_two_idempotency_keys_make_two_batches(http: httpx.Client) -> None:
    assert create(http, secrets.token_hex()).json()["id"] != create(http, secrets.token_hex()).json()["id"]


@pytest.mark.point("X2")
def test_an_idempotency_key_is_refused_for_another_request(http: httpx.Client) -> None:
    key = secrets.token_hex()
    create(http, key)
    answer = create(http, key, metadata={"another": "request"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "idempotency_key_reused"


@pytest.fixture(scope="module")
def extension(prepared: Prepared) -> dict[str, Any]:
    """The object x_cloister of a batch."""
    found: dict[str, Any] = prepared.batch("main").look()["x_cloister"]
    return found


@pytest.mark.point("X3")
@pytest.mark.parametrize(
    ("field", "kinds"),
    [
        ("queue_position", (int, type(None))),
        ("rate_rows_per_second", (float, int, type(None))),
        ("eta_seconds", (int, type(None))),
        ("estimated_completion_at", (int, type(None))),
        ("deadline_risk", (str, type(None))),
        ("gpu_seconds", (float, int)),
        ("job_id", (str, type(None))),
        ("failed_jobs", (int,)),
    ],
    ids=["queue_position", "rate_rows_per_second", "eta_seconds", "estimated_completion_at", "deadline_risk",
         "gpu_seconds", "job_id", "failed_jobs"],
)  # fmt: skip
def test_x_cloister_has(extension: dict[str, Any], field: str, kinds: tuple[type, ...]) -> None:
    assert type(extension[field]) in kinds


@late
@pytest.mark.point("X3")
def test_an_ended_batch_has_no_queue_position_and_no_eta(main: dict[str, Any]) -> None:
    assert (main["x_cloister"]["queue_position"], main["x_cloister"]["eta_seconds"]) == (None, None)


@late
@pytest.mark.point("X4")
@pytest.mark.parametrize(("kind", "field"), [("output", "output_file_id"), ("error", "error_file_id")])
def test_results_of_an_ended_batch_equal_its_file(
    http: httpx.Client, client: openai.OpenAI, main: dict[str, Any], kind: str, field: str
) -> None:
    answer = http.get(f"batches/{main['id']}/results", params={"kind": kind})
    assert answer.content == client.files.content(main[field]).read()
    assert answer.headers["x-cloister-complete"] == "true"


@pytest.mark.point("X4")
def test_results_can_be_requested_before_any_exist(
    http: httpx.Client, client: openai.OpenAI, prepared: Prepared
) -> None:
    content = jsonl(chat(f"c-{n}", prepared.target.model) for n in range(3))
    file = client.files.create(file=("a.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    answer = http.get(f"batches/{batch.id}/results")
    client.batches.cancel(batch.id)
    assert (answer.status_code, answer.headers["x-cloister-complete"]) == (200, "false")


@pytest.mark.point("X4")
def test_a_batch_that_never_ran_has_no_results(http: httpx.Client, failed: dict[str, Any]) -> None:
    answer = http.get(f"batches/{failed['id']}/results")
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.point("X4")
@pytest.mark.parametrize("what", ["results", "events"])
def test_an_unknown_batch_is_a_404_for(http: httpx.Client, what: str) -> None:
    assert http.get(f"batches/batch_none/{what}").status_code == 404


@pytest.mark.point("A3")
@pytest.mark.parametrize("what", ["results", "events"])
def test_a_batch_of_another_project_is_a_404_for(target: Target, prepared: Prepared, what: str) -> None:
    if not target.other_api_key:
        pytest.skip("no key of another project was given (--other-api-key)")
    with target.http(authorization=f"Bearer {target.other_api_key}") as stranger:
        assert stranger.get(f"batches/{prepared.batch('main').id}/{what}").status_code == 404


def parsed(text: str) -> Events:
    """Parse server-sent events, without comments and blocks that are not events."""
    events = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and line[0] != ":")
        if "event" in fields:
            events.append(fields)
    return events


def events_of(http: httpx.Client, batch_id: str, last_id: str | None = None) -> httpx.Response:
    headers = {"last-event-id": last_id} if last_id else {}
    return http.get(f"batches/{batch_id}/events", headers=headers)


@pytest.fixture(scope="module")
def history(http: httpx.Client, cancelled: dict[str, Any]) -> Events:
    """Events of an ended batch."""
    answer = events_of(http, cancelled["id"])
    assert answer.headers["content-type"].split(";")[0] == "text/event-stream"
    return [event for event in parsed(answer.text) if "id" in event]


@pytest.mark.point("X5")
def test_events_contain_each_state(history: Events) -> None:
    states = [event["event"] for event in history if event["event"].startswith("batch.")]
    assert (states[0], states[-2:]) == ("batch.validating", ["batch.cancelling", "batch.cancelled"])


@pytest.mark.point("X5")
def test_events_have_increasing_ids_and_json_data(history: Events) -> None:
    ids = [int(event["id"]) for event in history]
    assert ids == sorted(set(ids))
    assert {type(json.loads(event["data"])) for event in history} == {dict}


@pytest.mark.point("X5")
def test_events_resume_after_the_last_event_id(http: httpx.Client, cancelled: dict[str, Any], history: Events) -> None:
    answer = events_of(http, cancelled["id"], history[0]["id"])
    assert [event for event in parsed(answer.text) if "id" in event] == history[1:]


@pytest.mark.point("X5")
def test_nothing_follows_the_last_event(http: httpx.Client, cancelled: dict[str, Any], history: Events) -> None:
    assert events_of(http, cancelled["id"], history[-1]["id"]).status_code == 204


@pytest.mark.point("X5")
def test_events_are_streamed_as_they_happen(target: Target, http: httpx.Client, prepared: Prepared) -> None:
    request = {"input_file_id": prepared.created["main"]["input_file_id"], "endpoint": CHAT}
    batch_id = http.post("batches", json={**request, "completion_window": "24h"}).json()["id"]
    seen = []
    with target.http() as other, other.stream("GET", f"batches/{batch_id}/events") as stream:
        for line in stream.iter_lines():
            if line == "event: batch.validating":
                http.post(f"batches/{batch_id}/cancel")
            if line.startswith("event: batch."):
                seen.append(line.removeprefix("event: "))
    assert seen[-2:] == ["batch.cancelling", "batch.cancelled"]


@pytest.mark.point("X6")
def test_a_creation_with_an_unknown_parameter_is_refused(http: httpx.Client) -> None:
    error = http.post("batches", json={**REQUEST, "completion_windw": "24h"}).json()["error"]
    assert (error["code"], error["param"]) == ("unknown_parameter", "completion_windw")


@pytest.mark.point("X6")
@pytest.mark.parametrize(
    ("name", "hint"), [("gzip", "gzip"), ("a JSON array", "array"), ("UTF-16", "UTF-8"), ("CSV", "one JSON object")]
)
def test_an_error_for_a_file_that_is_not_jsonl_contains_a_remedy(prepared: Prepared, name: str, hint: str) -> None:
    assert NO_JSONL[name]
    assert hint in str(prepared.refusals[name])


def errors_of(client: openai.OpenAI, target: Target, content: bytes) -> list[dict[str, Any]]:
    file = client.files.create(file=("a.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    ended = Watched(client=client, id=batch.id, timeout_s=target.timeout_s).ended()
    errors: list[dict[str, Any]] = ended["errors"]["data"]
    return errors


@pytest.mark.point("X6")
def test_an_error_for_a_misspelt_model_names_a_similar_model(client: openai.OpenAI, target: Target) -> None:
    (error,) = errors_of(client, target, jsonl([chat("a", f"{target.model}x")]))
    assert f"'{target.model}'" in error["message"]


@pytest.mark.point("X6")
def test_all_errors_of_one_line_are_reported(client: openai.OpenAI, target: Target) -> None:
    errors = errors_of(client, target, jsonl([{"method": "PUT", "url": "/v1/poems"}]))
    assert {(error["code"], error["line"]) for error in errors} == {
        ("missing_required_parameter", 1), ("invalid_method", 1), ("invalid_url", 1),
    }  # fmt: skip
    assert {error["param"] for error in errors} == {"custom_id", "method", "url", "body"}


@pytest.mark.point("X6")
def test_at_most_a_thousand_errors_are_listed(client: openai.OpenAI, target: Target) -> None:
    assert len(errors_of(client, target, b"{\n" * (LISTED_AT_MOST + 100))) == LISTED_AT_MOST


@pytest.mark.point("X6")
def test_an_output_file_cannot_be_an_input_file(client: openai.OpenAI, target: Target, main: dict[str, Any]) -> None:
    batch = client.batches.create(input_file_id=main["output_file_id"], endpoint=CHAT, completion_window="24h")
    ended = Watched(client=client, id=batch.id, timeout_s=target.timeout_s).ended()
    assert (ended["status"], ended["errors"]["data"][0]["param"]) == ("failed", "file_id")


@pytest.mark.point("X6")
def test_files_can_be_deleted_during_paging(client: openai.OpenAI) -> None:
    made = {client.files.create(file=(f"{n}.jsonl", b"{}"), purpose="batch").id for n in range(5)}
    deleted = set()
    for file in itertools.islice(client.files.list(limit=2), PAGED_AT_MOST):
        if file.id in made:
            deleted.add(client.files.delete(file.id).id)
    assert deleted == made
