"""Valid lines skip the full check, and no line with an error does."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from ray_job.contract.job_spec import ModelSpec
from service.input_file import InputFacts, read_input_file
from service.input_file.json_lines import is_flat, is_too_deep
from service.model_catalogue import CatalogueModel

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
INPUTS: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    EMBEDDINGS: {"input": ["one", "two"]},
}
MODELS = {
    name: CatalogueModel(spec=ModelSpec(id=name, source="x", engine=name), endpoints=(CHAT, COMPLETIONS, EMBEDDINGS))
    for name in ("direct", "processor")
}


class CountedModels(Mapping[str, CatalogueModel]):
    """A catalogue that counts its lookups, which only the full check of a line needs."""

    def __init__(self) -> None:
        self.lookups = 0

    def __getitem__(self, name: str) -> CatalogueModel:
        self.lookups += 1
        return MODELS[name]

    def __iter__(self) -> Iterator[str]:
        return iter(MODELS)

    def __len__(self) -> int:
        return len(MODELS)


def lines(count: int, endpoint: str = CHAT, model: str = "direct", prefix: str = "", **body: Any) -> list[bytes]:
    requests = (
        {
            "custom_id": f"{prefix}{number}",
            "method": "POST",
            "url": endpoint,
            "body": {"model": model} | INPUTS[endpoint] | body,
        }
        for number in range(count)
    )
    return [json.dumps(request).encode() for request in requests]


def read(content: list[bytes], endpoint: str = CHAT, models: Any = MODELS, **options: Any) -> InputFacts:
    return read_input_file([b"\n".join(content)], endpoint=endpoint, models=models, **options)


def nested(depth: int) -> Any:
    return json.loads("[" * depth + "]" * depth)


def nested_objects(depth: int) -> Any:
    return json.loads('{"a":' * depth + "1" + "}" * depth)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"endpoint": COMPLETIONS},
        {"endpoint": EMBEDDINGS},
        {"model": "processor"},
        {"model": "processor", "endpoint": EMBEDDINGS, "input": "one"},
        {"prefix": "x" * 63},
        {"stream": False},
        {"user": "x" * 2_000},
        {"user": "x" * 2_000, "x": nested(400)},
    ],
)
def test_valid_lines_after_the_first_skip_the_full_check(options: dict[str, Any]) -> None:
    lookups = []
    for count in (2, 10):
        models = CountedModels()
        facts = read(lines(count, **options), options.get("endpoint", CHAT), models)
        assert (facts.total, facts.errors) == (count, ())
        lookups.append(models.lookups)
    assert lookups[0] == lookups[1]


@pytest.mark.parametrize(
    ("deep", "allowed"),
    [
        ({"x": nested(498)}, True),
        ({"x": nested(499)}, False),
        ({"x": nested_objects(498)}, True),
        ({"x": nested_objects(499)}, False),
        ({"x": [{"y": nested(498)}]}, False),
        ({"x": [0, nested_objects(498)]}, False),
        ({"x": [[]] * 600}, True),
        ({"x": "[" * 600}, True),
    ],
)
@pytest.mark.parametrize("number", [1, 2])
def test_depth_is_limited_to_500_levels_on_every_line(number: int, deep: dict[str, Any], *, allowed: bool) -> None:
    content = [*lines(number - 1, COMPLETIONS, prefix="first"), *lines(1, COMPLETIONS, **deep)]
    assert [error.line for error in read(content, COMPLETIONS).errors] == ([] if allowed else [number])


def test_deep_field_beside_the_body_is_an_error() -> None:
    first, second = lines(2)
    second = second[:-1] + b', "x": ' + json.dumps(nested(500)).encode() + b"}"
    assert [error.line for error in read([first, second]).errors] == [2]


def test_brackets_in_strings_are_no_levels() -> None:
    assert not is_too_deep(json.dumps(['\\"[{' * 600]).encode())
    assert is_too_deep(json.dumps(nested(501)).encode())
    assert not is_too_deep(json.dumps([nested(499), nested(400)]).encode())


@pytest.mark.parametrize(
    ("body", "flat"),
    [
        ({}, True),
        ({"a": "x", "b": 1, "c": 1.5, "d": None, "e": True}, True),
        ({"a": [1, "x", None], "b": []}, True),
        ({"a": [{"role": "user", "content": "hi"}, {}, 1]}, True),
        ({"a": {}}, False),
        ({"a": "x", "b": {"c": 1}, "d": 1}, False),
        ({"a": [[]]}, False),
        ({"a": [1, {"content": [1]}, 1]}, False),
        ({"a": [{"content": {}}]}, False),
    ],
)
def test_flat_body_holds_lists_and_objects_of_scalars(body: dict[str, Any], *, flat: bool) -> None:
    assert is_flat({"custom_id": "a", "method": "POST", "url": CHAT, "body": body}) is flat


def test_request_with_a_fifth_field_is_not_flat() -> None:
    assert not is_flat({"custom_id": "a", "method": "POST", "url": CHAT, "body": {}, "x": []})


@pytest.mark.parametrize("change", [{"n": 2}, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}])
def test_unsupported_field_is_an_error_on_every_line(change: dict[str, Any]) -> None:
    content = [*lines(1, model="processor", prefix="first"), *lines(2, model="processor", **change)]
    assert [error.line for error in read(content).errors] == [2, 3]
    direct = [*lines(1, prefix="first"), *lines(2, **change)]
    assert read(direct).errors == ()


def test_endpoint_that_the_model_lacks_is_an_error_on_every_line() -> None:
    models = {"direct": CatalogueModel(spec=ModelSpec(id="direct", source="x"), endpoints=(EMBEDDINGS,))}
    assert [error.line for error in read(lines(3), models=models).errors] == [1, 2, 3]


def test_embedding_inputs_of_all_lines_are_counted() -> None:
    facts = read(lines(6, EMBEDDINGS, input=["x"] * 10_000), EMBEDDINGS)
    assert "60,000 embedding inputs" in facts.errors[0].message
    assert read(lines(5, EMBEDDINGS, input=["x"] * 10_000), EMBEDDINGS).errors == ()
