"""The order of execution."""

import itertools
import json
import random
from typing import Any

import pytest

from service.planning.order import Traits, execution_groups, line_traits


def line(**body: Any) -> bytes:
    return json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()


def chat(system: str, user: str = "Why?", **fields: Any) -> bytes:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return line(messages=messages, **fields)


def order(*lines: bytes) -> list[int]:
    return list(itertools.chain(*execution_groups([line_traits(each) for each in lines])))


def test_lines_without_a_common_beginning_keep_their_order() -> None:
    assert order(*(chat(f"{n} " * 200) for n in range(5))) == [0, 1, 2, 3, 4]


def test_lines_with_one_system_prompt_run_next_to_each_other() -> None:
    assert order(*(chat(f"{system} " * 200, str(n)) for n, system in enumerate("abacb"))) == [0, 2, 1, 4, 3]


def test_system_prompts_that_differ_at_their_end_count_as_shared() -> None:
    lines = [chat(f"{system} " * 500 + f"It is {n} o'clock.") for n, system in enumerate("abab")]
    assert order(*lines) == [0, 2, 1, 3]


def test_groups_share_a_beginning() -> None:
    traits = [line_traits(chat(f"{system} " * 200, str(n))) for n, system in enumerate("abac")]
    assert execution_groups(traits) == [[0, 2], [1], [3]]


def test_lines_that_share_more_are_closer() -> None:
    book = "A common beginning. " * 40
    lines = [chat(book + f"Chapter {chapter}. " * 80, str(n)) for n, chapter in enumerate("1212")]
    planned = order(*lines, chat("Something else. " * 40))
    assert {abs(planned.index(0) - planned.index(2)), abs(planned.index(1) - planned.index(3))} == {1}


def test_beginnings_of_the_first_user_message_and_tools_count() -> None:
    examples = "Q: 1 + 1? A: 2. " * 50
    tools = [{"type": "function", "function": {"name": name * 100}} for name in "xy"]
    first, second = ([{"role": "user", "content": examples + question}] for question in ("a", "b"))
    assert line_traits(line(messages=first)).prefix[:4] == line_traits(line(messages=second)).prefix[:4]
    with_tools = [line_traits(line(messages=first, tools=[tool])).prefix for tool in tools]
    assert with_tools[0] != with_tools[1]


def test_prompts_of_completions_are_grouped() -> None:
    assert order(*(line(prompt=f"{start} " * 200) for start in "aba")) == [0, 2, 1]


def test_long_rows_run_first() -> None:
    lines = [chat("short", max_tokens=10), chat("long", max_completion_tokens=1_000), chat("middle", max_tokens=100)]
    assert order(*lines) == [1, 2, 0]


def test_rows_of_about_the_same_length_keep_their_order() -> None:
    assert order(*(chat("x", max_tokens=tokens) for tokens in (130, 200, 140))) == [0, 1, 2]


def test_long_rows_of_a_group_run_first_in_it() -> None:
    lines = [chat("a" * 300, max_tokens=tokens) for tokens in (10, 1_000)]
    assert order(*lines, chat("b" * 300, max_tokens=100)) == [1, 0, 2]


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"{", b'{"body": 5}', b'{"body": {"messages": [3]}}', b'{"body": {"messages": []}}', b'{"body": {}}'],
)
def test_line_of_any_shape_has_traits(raw: bytes) -> None:
    assert line_traits(raw).prefix == b""


def test_order_holds_every_line_once() -> None:
    chance = random.Random(7)  # noqa: S311 - repeatable on purpose
    traits = [
        Traits(
            prefix=bytes(chance.choice(b"ab") for _ in range(4 * chance.randrange(5))),
            cost=chance.randrange(99),
            tokens=1,
        )
        for _ in range(300)
    ]
    assert sorted(itertools.chain(*execution_groups(traits))) == list(range(300))


def test_equal_deterministic_lines_have_one_identity() -> None:
    one, other = (line_traits(chat("x", temperature=0, top_p=1)), line_traits(chat("x", top_p=1, temperature=0)))
    assert one.identity == other.identity is not None
    assert line_traits(chat("y", temperature=0)).identity != line_traits(chat("x", temperature=0)).identity


def test_lines_that_depend_on_chance_have_no_identity() -> None:
    assert line_traits(chat("x")).identity is None
    assert line_traits(chat("x", temperature=0.5)).identity is None
    assert line_traits(chat("x", temperature=0.5, seed=1)).identity is not None


def test_integers_that_orjson_cannot_hold_are_told_apart() -> None:
    one, other = (line_traits(chat("x", temperature=0, top_k=(1 << 64) + n)).identity for n in (0, 1))
    assert one != other


def test_deep_values_have_an_identity() -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    one, other = (line_traits(chat("x", temperature=0, extra=[deep, n])).identity for n in (0, 0))
    assert one == other is not None
    assert line_traits(chat("x", temperature=0, extra=[deep, 1])).identity != one
    assert line_traits(line(prompt=deep)).prefix


def test_tokens_are_those_of_the_line_and_of_its_answer() -> None:
    raw = chat("x" * 400)
    assert line_traits(raw).tokens == len(raw) // 4 + 256
    named = chat("x", max_tokens=1_000)
    assert line_traits(named).tokens == len(named) // 4 + 1_000
    embedding = line(input="x" * 400)
    assert line_traits(embedding).tokens == len(embedding) // 4


def test_tokens_of_a_line_have_a_limit() -> None:
    assert line_traits(chat("x", max_tokens=10**18)).tokens < 1 << 25
