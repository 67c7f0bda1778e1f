"""Token counts of whole files, and refusal of what is too long for a model."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from ray_job.contract.job_spec import ModelSpec
from ray_job.contract.prompt_rules import ChatRules, PromptRules
from service.input_file import InputFacts, read_input_file
from service.model_catalogue import CatalogueModel
from service.prompts import FileCount, PromptCounter
from service.prompts.file_count import SAMPLE_LINES, WHOLE_LINES

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MODELS = {"demo": CatalogueModel(spec=ModelSpec(id="demo", source="x"))}


@pytest.fixture(scope="module")
def counter() -> PromptCounter:
    """One token for each word, and one for the template of a chat."""
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    chat = ChatRules(template="BEGIN {{ messages[0].content }}", content_format="string")
    rules = PromptRules(max_prompt_tokens=400, max_model_len=500, tokenizer=words.to_str(), chat=chat)
    return PromptCounter(rules)


def read(counter: PromptCounter | None, bodies: list[dict[str, Any]], endpoint: str = CHAT) -> InputFacts:
    requests = (
        {"custom_id": f"{number}", "method": "POST", "url": endpoint, "body": {"model": "demo", **body}}
        for number, body in enumerate(bodies)
    )
    content = "\n".join(map(json.dumps, requests)).encode()
    count = FileCount(
        find_counter={"demo": counter}.__getitem__, endpoint=endpoint, size_bytes=len(content), line_count=len(bodies)
    )
    return read_input_file([content], endpoint=endpoint, models=MODELS, file_count=count)


def chat(words: int, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "word " * words}], **fields}


def test_every_line_of_a_small_file_is_counted(counter: PromptCounter) -> None:
    tokens = read(counter, [chat(words, max_tokens=5) for words in (0, 1, 7, 7)]).tokens
    assert tokens is not None
    assert (tokens.input_tokens, tokens.lines, tokens.most_output) == (4 + 15, 4, 20)


def test_a_large_file_is_sampled_without_a_pattern(counter: PromptCounter) -> None:
    bodies = [chat(1 + 5 * (number % 10 == 0), max_tokens=2) for number in range(2 * WHOLE_LINES)]
    found = [read(counter, bodies).tokens for _ in range(2)]
    assert found[0] == found[1]
    assert found[0] is not None
    assert 0.8 * SAMPLE_LINES < found[0].lines < 1.2 * SAMPLE_LINES
    exact = sum(2 + 5 * (number % 10 == 0) for number in range(2 * WHOLE_LINES))
    assert found[0].input_tokens == pytest.approx(exact, rel=0.02)


ASKED = (("max_tokens", 500), ("max_tokens", 501), ("max_completion_tokens", 600))


def test_lines_that_the_engine_refuses_are_refused_with_tokens_and_limit(counter: PromptCounter) -> None:
    bodies = [chat(399), chat(400), *(chat(1, **{name: n}) for name, n in ASKED)]
    facts = read(counter, bodies)
    assert [(error.code, error.line, error.param) for error in facts.errors] == [
        ("token_limit_exceeded", 2, "body.messages"),
        ("token_limit_exceeded", 4, "body.max_tokens"),
        ("token_limit_exceeded", 5, "body.max_completion_tokens"),
    ]
    assert facts.errors[0].message == (
        "The prompt has 401 tokens; the model 'demo' accepts at most 400. Shorten 'messages'."
    )
    assert facts.tokens is None


def test_long_lines_of_a_large_file_are_all_counted(counter: PromptCounter) -> None:
    bodies = [chat(1)] * (2 * WHOLE_LINES)
    for line in (5, WHOLE_LINES, -1):
        bodies[line] = chat(600)
    facts = read(counter, bodies)
    assert [error.line for error in facts.errors] == [6, WHOLE_LINES + 1, 2 * WHOLE_LINES]


def test_the_longest_of_several_prompts_decides(counter: PromptCounter) -> None:
    fits, too_long = {"prompt": ["a " * 300, "b " * 300]}, {"prompt": ["a", "b " * 401]}
    assert [error.line for error in read(counter, [fits, too_long], TEXT).errors] == [2]


def test_tokens_are_unknown_if_a_line_cannot_be_counted(counter: PromptCounter) -> None:
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}
    facts = read(counter, [chat(1), image])
    assert (facts.error_count, facts.tokens) == (0, None)


def test_without_a_tokenizer_nothing_is_counted_or_refused() -> None:
    facts = read(None, [chat(1000, max_tokens=10**9)] * 2)
    assert (facts.error_count, facts.tokens) == (0, None)
