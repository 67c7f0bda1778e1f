"""Requests that make an engine fetch a URL: refused at validation, and refused again by the engine."""

import json
from typing import Any

import pytest

from ray_job.contract.job_spec import ModelSpec
from service.input_file import InputFacts, read_input_file
from service.model_catalogue import CatalogueModel
from tests.integration.reconciler_harness import CHAT, Stack

EMBEDDINGS = "/v1/embeddings"
COMPLETIONS = "/v1/completions"
MODELS = {
    engine: CatalogueModel(
        spec=ModelSpec(id=engine, source="x", engine=engine), endpoints=(CHAT, COMPLETIONS, EMBEDDINGS)
    )
    for engine in ("direct", "serve", "http", "processor")
}
SECRET = "169.254.169.254/canary"
TARGETS = (
    f"http://{SECRET}",
    f"https://{SECRET}",
    f"HTTP://{SECRET}",
    f" http://{SECRET}",
    f"\thttp://{SECRET}",
    f"\u00a0http://{SECRET}",
    f"//{SECRET}",
    f"\\\\{SECRET}",
    f"file:///{SECRET}",
    f"ftp://{SECRET}",
    f"s3://{SECRET}",
    f"gopher://{SECRET}",
    f"http:{SECRET}",
    f"/{SECRET}",
    f" data:,http://{SECRET}",
    f"DATA:text/plain,{SECRET}",
    f"data{SECRET}",
    "",
)
DATA = "data:image/png;base64,AAAA"
TEXT = {"type": "text", "text": f"look at http://{SECRET}"}


def line(body: dict[str, Any], *, model: str = "direct", endpoint: str = CHAT, custom_id: str = "a") -> bytes:
    request = {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": {"model": model, **body}}
    return json.dumps(request).encode()


def read(body: dict[str, Any], *, model: str = "direct", endpoint: str = CHAT) -> InputFacts:
    # The first line names the model, so that the second one may take the short way.
    plain = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}}.get(endpoint, {"prompt": "hi", "input": "hi"})
    lines = [line(plain, model=model, endpoint=endpoint), line(body, model=model, endpoint=endpoint, custom_id="b")]
    return read_input_file([b"\n".join(lines)], endpoint=endpoint, models=MODELS)


def user(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "s"}, {"role": role, "content": list(parts)}]}


def refusals(facts: InputFacts) -> list[tuple[str, str | None, int | None]]:
    assert SECRET not in str(facts.errors)
    return [(error.code, error.param, error.line) for error in facts.errors]


@pytest.mark.parametrize("url", TARGETS)
@pytest.mark.parametrize("model", ["direct", "serve", "http"])
def test_image_that_is_not_a_data_url_is_refused_with_line_and_field(model: str, url: str) -> None:
    facts = read(user(TEXT, {"type": "image_url", "image_url": {"url": url}}), model=model)
    assert refusals(facts) == [("media_url_unsupported", "body.messages[1].content[1].image_url.url", 2)]
    assert "data:" in facts.errors[0].message


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "audio_url", "audio_url": {"url": f"http://{SECRET}"}}, "audio_url.url"),
        ({"type": "video_url", "video_url": {"url": f"http://{SECRET}"}}, "video_url.url"),
        ({"type": "input_image", "image_url": f"http://{SECRET}"}, "image_url"),
        ({"image_url": f"http://{SECRET}"}, "image_url"),
        ({"audio_url": f"http://{SECRET}"}, "audio_url"),
        ({"video_url": [f"http://{SECRET}"]}, "video_url[0]"),
        ({"type": "text", "text": "a", "image_url": f"http://{SECRET}"}, "image_url"),
        ({"type": "image", "image": f"http://{SECRET}"}, "image"),
        ({"type": "image", "url": f"http://{SECRET}"}, "url"),
        ({"type": "video", "video": [f"http://{SECRET}"]}, "video[0]"),
        ({"type": "input_audio", "input_audio": {"data": f"http://{SECRET}", "format": "wav"}}, "input_audio.data"),
        ({"type": "input_audio", "input_audio": {"url": f"http://{SECRET}"}}, "input_audio.url"),
        ({"type": "file", "file": {"file_data": f"http://{SECRET}"}}, "file.file_data"),
        ({"type": "input_file", "file_url": f"http://{SECRET}"}, "file_url"),
    ],
)
def test_every_kind_of_media_part_is_checked(part: dict[str, Any], place: str) -> None:
    facts = read(user(part))
    assert refusals(facts) == [("media_url_unsupported", f"body.messages[1].content[0].{place}", 2)]


def test_media_nested_in_a_tool_message_is_refused() -> None:
    inner = {"type": "tool_result", "content": [{"type": "image_url", "image_url": {"url": f"http://{SECRET}"}}]}
    facts = read(user(inner, role="tool"))
    assert refusals(facts) == [("media_url_unsupported", "body.messages[1].content[0].content[0].image_url.url", 2)]


def test_name_of_an_unknown_field_is_not_quoted() -> None:
    facts = read(user({SECRET: {"image_url": f"http://{SECRET}"}}))
    assert refusals(facts) == [("media_url_unsupported", "body.messages[1].content[0].….image_url", 2)]


@pytest.mark.parametrize("field", ["messages", "input"])
@pytest.mark.parametrize("is_batched", [False, True])
def test_messages_of_embeddings_are_checked(field: str, *, is_batched: bool) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://{SECRET}"}}]}]
    facts = read({field: [messages] if is_batched else messages}, endpoint=EMBEDDINGS)
    start = f"body.{field}[0][0]" if is_batched else f"body.{field}[0]"
    assert refusals(facts) == [("media_url_unsupported", f"{start}.content[0].image_url.url", 2)]


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "file", "file": {"file_id": "file-123"}}, "file.file_id"),
        ({"type": "input_image", "file_id": "file-123"}, "file_id"),
        ({"type": "input_audio", "input_audio": {"file_id": "file-123"}}, "input_audio.file_id"),
    ],
)
def test_uploaded_file_as_media_is_refused_with_the_remedy(part: dict[str, Any], place: str) -> None:
    facts = read(user(part))
    assert refusals(facts) == [("media_file_unsupported", f"body.messages[1].content[0].{place}", 2)]
    assert "Send its content as a data: URL" in facts.errors[0].message


@pytest.mark.parametrize("name", ["image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"])
def test_serialized_tensor_in_a_message_is_refused(name: str) -> None:
    facts = read(user({"type": name, name: "AAAA", "data": "AAAA"}))
    assert refusals(facts) == [("unsupported_parameter", f"body.messages[1].content[0].{name}", 2)]


def test_name_of_cached_media_is_refused_because_it_may_name_that_of_another_project() -> None:
    facts = read(user({"type": "image_url", "image_url": None, "uuid": SECRET}))
    assert refusals(facts) == [("unsupported_parameter", "body.messages[1].content[0].uuid", 2)]


@pytest.mark.parametrize(
    "part",
    [
        TEXT,
        {"type": "image_url", "image_url": {"url": DATA, "detail": "low"}},
        {"type": "image_url", "image_url": None},
        {"type": "input_audio", "input_audio": {"data": "//79AA==", "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": "data:audio/wav;base64,AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA", "filename": "a.pdf"}},
        {"type": "refusal", "refusal": "http://example.com"},
        {"type": "output_text", "text": "a", "annotations": [{"type": "url_citation", "url": "https://example.com"}]},
        f"http://{SECRET}",
    ],
)
def test_data_urls_and_text_are_accepted(part: Any) -> None:
    assert read(user(part)).errors == ()


def test_url_in_a_prompt_or_a_tool_call_is_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"image_url": "http://example.com"}}}
    body = {
        "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": "x"}]
    }
    assert read(body).errors == ()
    assert read({"prompt": ["http://example.com"]}, endpoint=COMPLETIONS).errors == ()
    assert read({"input": ["http://example.com", "x"]}, endpoint=EMBEDDINGS).errors == ()


def test_deep_nesting_ends_in_an_error_and_not_in_a_crash() -> None:
    part: Any = {"image_url": f"http://{SECRET}"}
    for _ in range(400):
        part = {"content": [part]}
    codes = {error.code for error in read(user(part)).errors}
    assert codes == {"invalid_request", "media_url_unsupported"}


def test_batch_with_an_outside_url_fails_before_any_job_starts(stack: Stack) -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://{SECRET}"}}]}]
    }
    stack.create(line(body, model="demo"))
    assert stack.advance()["status"] == "failed"
    (error,) = stack.errors()
    assert (error["code"], error["line"]) == ("media_url_unsupported", 1)
    assert error["param"] == "body.messages[0].content[0].image_url.url"
    assert stack.launcher.launched == []
