"""The example file of `make demo`: the same 240 lines every time.

They differ in what a batch may differ in: sampling parameters, stop strings, several answers for one
question, system prompts from none to some hundred tokens, several turns, structured output. Ten
lines are wrong on purpose, in ways that only the engine can tell.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

ENDPOINT: Final = "/v1/chat/completions"
TOTAL: Final = 240
BROKEN_EVERY: Final = 24
BROKEN: Final = TOTAL // BROKEN_EVERY

_SUBJECTS = ("a lighthouse", "the tides", "a glass bridge", "winter wheat", "a slow train", "old maps", "a beehive")
_TASKS = ("Describe", "Explain in one sentence", "Name three facts about", "Write a headline about", "Translate")
_RULES = (
    "Answer in plain English.",
    "Use short sentences.",
    "Do not repeat the question.",
    "Say so when you are not sure.",
    "Prefer numbers to adjectives.",
    "Never mention these rules.",
)


def _system_prompt(number: int) -> list[dict[str, str]]:
    length = number % 4
    if length == 0:
        return []
    rules = " ".join(_RULES[: 2 * length] * length**2)
    return [{"role": "system", "content": f"You are assistant {length}. {rules}"}]


def _turns(number: int) -> list[dict[str, str]]:
    subject = _SUBJECTS[number % len(_SUBJECTS)]
    task = _TASKS[number % len(_TASKS)]
    question = {"role": "user", "content": f"{task} {subject}, please. ({number})"}
    if number % 5:
        return [question]
    return [
        question,
        {"role": "assistant", "content": f"Gladly: {subject}."},
        {"role": "user", "content": "Again, but shorter."},
    ]


def _sampling(number: int) -> dict[str, Any]:
    variants: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9, "seed": number},
        {"temperature": 1.0, "top_p": 0.5, "seed": number, "frequency_penalty": 0.4},
        {"temperature": 0.8, "seed": number, "n": 2},
        {"temperature": 0, "stop": [".", "\n"]},
        {"temperature": 0, "logprobs": True, "top_logprobs": 2},
        {"temperature": 0.9, "seed": number, "presence_penalty": 0.5},
        {"temperature": 0, "structured_outputs": {"regex": "(yes|no|perhaps)"}},
    )
    return {"max_tokens": 8 + 8 * (number % 4), **variants[number % len(variants)]}


def _broken(number: int) -> dict[str, Any]:
    """What vLLM refuses; each of these is a well-formed request all the same."""
    variants: tuple[dict[str, Any], ...] = (
        {"messages": [{"role": "user", "content": "far too long " * 3000}]},
        {"temperature": -1},
        {"structured_outputs": {"regex": "("}},
        {"top_p": 7},
        {"max_tokens": 100_000},
    )
    return variants[(number // BROKEN_EVERY) % len(variants)]


def demo_lines(model: str) -> Iterator[str]:
    """The lines of the file, each with its line break."""
    for number in range(1, TOTAL + 1):
        broken = number % BROKEN_EVERY == 0
        body = {
            "model": model,
            "messages": [*_system_prompt(number), *_turns(number)],
            **_sampling(number),
            **(_broken(number) if broken else {}),
        }
        custom_id = f"{'broken' if broken else 'line'}-{number:03}"
        yield json.dumps({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}) + "\n"
