"""The example file of `make demo`: the same 240 lines every time.

The lines differ in sampling parameters, stop strings, the number of answers, the length of the system prompt (from none
to some hundred tokens), the number of turns, and structured output. Ten lines are invalid on purpose, in ways that only
the engine can detect.
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
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.5, "frequency_penalty": 0.4},
    {"temperature": 0.8, "n": 2},
    {"temperature": 0, "stop": [".", "\n"]},
    {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.9, "presence_penalty": 0.5},
    {"temperature": 0, "structured_outputs": {"regex": "(yes|no|perhaps)"}},
)
# Requests that vLLM refuses although they are well formed. None is beyond the limits of the model: once an engine has
# told them, a batch with such a line fails at validation.
_BROKEN: tuple[dict[str, Any], ...] = (
    {"temperature": -1},
    {"structured_outputs": {"regex": "("}},
    {"top_p": 7},
)


def demo_lines(model: str) -> Iterator[str]:
    """Yield the lines of the file, each with its line break."""
    for number in range(1, TOTAL + 1):
        messages = []
        if length := number % 4:
            rules = " ".join(_RULES[: 2 * length] * length**2)
            messages.append({"role": "system", "content": f"You are assistant {length}. {rules}"})
        subject = _SUBJECTS[number % len(_SUBJECTS)]
        task = _TASKS[number % len(_TASKS)]
        messages.append({"role": "user", "content": f"{task} {subject}, please. ({number})"})
        if number % 5 == 0:
            messages.append({"role": "assistant", "content": f"Gladly: {subject}."})
            messages.append({"role": "user", "content": "Again, but shorter."})
        body = {"model": model, "messages": messages, "max_tokens": 8 + 8 * (number % 4)}
        body |= _SAMPLING[number % len(_SAMPLING)]
        if body["temperature"]:
            body["seed"] = number
        is_broken = number % BROKEN_EVERY == 0
        if is_broken:
            body |= _BROKEN[(number // BROKEN_EVERY) % len(_BROKEN)]
        custom_id = f"{'broken' if is_broken else 'line'}-{number:03}"
        yield json.dumps({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}) + "\n"
