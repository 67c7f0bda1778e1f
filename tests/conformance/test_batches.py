"""Creation of batches, and the Batch object."""

import asyncio
import time
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.prepared import METADATA, Prepared
from tests.conformance.target import Target
from tests.conformance.test_files import UNKNOWN_IDS
from tests.conformance.workload import CHAT, NO_FILE

pytestmark = pytest.mark.point("B1")

# The input file does not exist: the creation succeeds, and nothing runs.
REQUEST = {"input_file_id": NO_FILE, "endpoint": CHAT, "completion_window": "24h"}
TIMES = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")


def post(http: httpx.Client, **changes: Any) -> httpx.Response:
    return http.post("batches", json={name: value for name, value in {**REQUEST, **changes}.items() if value != ...})


@pytest.fixture(scope="module")
def created(http: httpx.Client) -> dict[str, Any]:
    """A new batch."""
    answer: dict[str, Any] = post(http, metadata={"a": "ü"}).raise_for_status().json()
    return answer


@pytest.mark.point("B2")
@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("object", "batch"),
        ("endpoint", CHAT),
        ("input_file_id", NO_FILE),
        ("completion_window", "24h"),
        ("status", "validating"),
        ("metadata", {"a": "ü"}),
    ],
    ids=["object", "endpoint", "input_file_id", "completion_window", "status", "metadata"],
)
def test_a_new_batch_has_its(created: dict[str, Any], field: str, expected: object) -> None:
    assert created[field] == expected


@pytest.mark.point("B2")
@pytest.mark.parametrize("field", ["errors", "output_file_id", "error_file_id", *TIMES])
def test_a_new_batch_has_no(created: dict[str, Any], field: str) -> None:
    assert created.get(field) is None


@pytest.mark.point("B2")
def test_a_batch_id_starts_with_batch(created: dict[str, Any]) -> None:
    assert created["id"][:6] == "batch_"


@pytest.mark.point("B2")
def test_created_at_is_the_current_time_in_unix_seconds(created: dict[str, Any]) -> None:
    assert type(created["created_at"]) is int
    assert abs(created["created_at"] - time.time()) < 300


@pytest.mark.point("B3")
def test_a_batch_expires_24_hours_after_its_creation(created: dict[str, Any]) -> None:
    assert created["expires_at"] == created["created_at"] + 24 * 3600


@pytest.mark.point("B2")
def test_request_counts_of_a_new_batch_are_zero(created: dict[str, Any]) -> None:
    assert created.get("request_counts") in (None, {"total": 0, "completed": 0, "failed": 0})


def test_a_creation_returns_200(http: httpx.Client) -> None:
    assert post(http).status_code == 200


@pytest.mark.point("B7")
@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
def test_an_endpoint_is_accepted(http: httpx.Client, endpoint: str) -> None:
    assert post(http, endpoint=endpoint).status_code == 200


@pytest.mark.point("B7")
@pytest.mark.parametrize("endpoint", ["/v1/poems", "/v1/chat/completions/", "chat/completions", "", "/v1/files"])
def test_another_endpoint_is_refused_with_a_list_of_endpoints(http: httpx.Client, endpoint: str) -> None:
    answer = post(http, endpoint=endpoint)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "endpoint")
    for offered in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
        assert offered in error["message"]


@pytest.mark.point("B3")
@pytest.mark.parametrize("window", ["1h", "48h", "24H", "1d", "86400s", ""])
def test_another_completion_window_is_refused(http: httpx.Client, window: str) -> None:
    answer = post(http, completion_window=window)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "completion_window")


@pytest.mark.point("B6")
@pytest.mark.parametrize("param", ["input_file_id", "endpoint", "completion_window"])
def test_a_creation_is_refused_without(http: httpx.Client, param: str) -> None:
    answer = post(http, **{param: ...})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("missing_required_parameter", param)


@pytest.mark.point("B6")
@pytest.mark.parametrize(
    ("param", "value"),
    [("input_file_id", 7), ("input_file_id", None), ("metadata", "x"), ("metadata", ["x"])],
    ids=["input_file_id a number", "input_file_id null", "metadata a string", "metadata an array"],
)
def test_a_value_of_the_wrong_type_is_refused(http: httpx.Client, param: str, value: object) -> None:
    answer = post(http, **{param: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_type", param)


@pytest.mark.point("B6")
@pytest.mark.parametrize(
    "value", [1, True, 1.5, ["x"], {"y": "z"}], ids=["a number", "a boolean", "a fraction", "an array", "an object"]
)
def test_a_metadata_value_that_is_not_a_string_is_refused(http: httpx.Client, value: object) -> None:
    answer = post(http, metadata={"x": value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_type", "metadata.x")


@pytest.mark.point("B6")
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"null", b"\xff"],
    ids=["empty", "cut off", "array", "string", "null", "not UTF-8"],
)
def test_a_body_that_is_not_a_json_object_is_refused(http: httpx.Client, body: bytes) -> None:
    answer = http.post("batches", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.point("B4")
@pytest.mark.parametrize(
    "metadata",
    [{str(n): "v" for n in range(16)}, {"k" * 64: "v"}, {"k": "v" * 512}, {"größe": "€" * 512}, {}, None],
    ids=["16 pairs", "a key of 64", "a value of 512", "512 non-ASCII characters", "empty", "null"],
)
def test_metadata_is_accepted_with(http: httpx.Client, metadata: dict[str, str] | None) -> None:
    answer = post(http, metadata=metadata)
    assert answer.status_code == 200
    assert (answer.json()["metadata"] or {}) == (metadata or {})


@pytest.mark.point("B4")
@pytest.mark.parametrize(
    "metadata",
    [{str(n): "v" for n in range(17)}, {"k" * 65: "v"}, {"k": "v" * 513}],
    ids=["17 pairs", "a key of 65", "a value of 513"],
)
def test_metadata_is_refused_with(http: httpx.Client, metadata: dict[str, str]) -> None:
    answer = post(http, metadata=metadata)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split(".")[0] == "metadata"


@pytest.mark.point("B5")
@pytest.mark.parametrize("seconds", [3_600, 2_592_000])
def test_output_expiry_is_accepted_with_seconds(http: httpx.Client, seconds: int) -> None:
    assert post(http, output_expires_after={"anchor": "created_at", "seconds": seconds}).status_code == 200


@pytest.mark.point("B5")
@pytest.mark.parametrize(
    ("expiry", "code"),
    [
        ({"anchor": "created_at", "seconds": 3_599}, "integer_below_min_value"),
        ({"anchor": "created_at", "seconds": 2_592_001}, "integer_above_max_value"),
        ({"anchor": "created_at", "seconds": "3600"}, "invalid_type"),
        ({"anchor": "created_at"}, "missing_required_parameter"),
        ({"seconds": 3_600}, "missing_required_parameter"),
        ({"anchor": "now", "seconds": 3_600}, "invalid_value"),
        ("created_at", "invalid_type"),
    ],
    ids=["seconds 3599", "seconds 2592001", "seconds a string", "no seconds", "no anchor", "anchor now", "a string"],
)
def test_a_wrong_output_expiry_is_refused(http: httpx.Client, expiry: object, code: str) -> None:
    answer = post(http, output_expires_after=expiry)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"].split(".")[0]) == (code, "output_expires_after")


@pytest.mark.point("B8")
def test_a_created_batch_can_be_retrieved(client: openai.OpenAI, created: dict[str, Any]) -> None:
    retrieved = client.batches.retrieve(created["id"]).to_dict()
    same = ("id", "object", "endpoint", "input_file_id", "completion_window", "created_at", "expires_at", "metadata")
    assert {name: retrieved[name] for name in same} == {name: created[name] for name in same}


@pytest.mark.point("B8")
def test_the_async_client_creates_and_retrieves_a_batch(target: Target) -> None:
    async def create() -> tuple[str, str]:
        async with target.async_client() as client:
            batch = await client.batches.create(input_file_id=NO_FILE, endpoint=CHAT, completion_window="24h")
            return batch.id, (await client.batches.retrieve(batch.id)).id

    first, again = asyncio.run(create())
    assert first == again


@pytest.mark.point("B8")
@pytest.mark.parametrize("form", UNKNOWN_IDS)
def test_an_unknown_batch_is_a_404(http: httpx.Client, form: str) -> None:
    answer = http.get(f"batches/{UNKNOWN_IDS[form].replace('file-', 'batch_')}")
    assert answer.status_code in ({404} if form == "well formed" else {400, 404, 414})
    if answer.status_code != 414:
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.point("B8")
def test_a_batch_cannot_be_deleted(http: httpx.Client, created: dict[str, Any]) -> None:
    assert http.delete(f"batches/{created['id']}").status_code in {404, 405}
    assert http.get(f"batches/{created['id']}").status_code == 200


@pytest.mark.point("B1")
def test_metadata_is_kept(prepared: Prepared) -> None:
    assert prepared.batch("main").look()["metadata"] == METADATA
