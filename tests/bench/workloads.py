"""The input files of the benchmark. Equal arguments produce equal files.

Prompts are passages of Python's documentation. Lengths in tokens are those of the demo model's tokenizer, within a few
percent.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

CHAT: Final = "/v1/chat/completions"
EMBEDDINGS: Final = "/v1/embeddings"
Body = dict[str, Any]

WORDS_PER_TOKEN: Final = 0.564
"""Of the demo model's tokenizer on these passages."""
MEDIAN_TOKENS: Final = 60
P99_TOKENS: Final = 600
LONGEST_TOKENS: Final = 2000
_NORMAL_P99: Final = 2.3263
LOGNORMAL_SIGMA: Final = math.log(P99_TOKENS / MEDIAN_TOKENS) / _NORMAL_P99
SYSTEM_PROMPTS: Final = 40
SYSTEM_TOKENS: Final = 1500
LARGE_ROW_BYTES: Final = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A kind of input file.

    Attributes:
        bodies: yields the bodies of a number of lines, without the model, from a source of chance.
        description: what the lines are, for tables.
        endpoint: the endpoint of every line.
        max_model_len: the context that the longest line needs.
        mean_row_tokens: tokens that a running row has in the KV cache, on average. Long rows run longer, so this is
            more than the mean of prompt and answer.
    """

    bodies: Callable[[random.Random, int], Iterator[Body]]
    description: str
    endpoint: str = CHAT
    max_model_len: int = 4096
    mean_row_tokens: float = 650


@cache
def _words() -> list[str]:
    from pydoc_data.topics import topics

    return " ".join(topics[name] for name in sorted(topics)).split()


def passage(chance: random.Random, tokens: int) -> str:
    """Return a random passage of about so many tokens."""
    words = _words()
    count = max(1, round(tokens * WORDS_PER_TOKEN))
    start = chance.randrange(len(words) - count)
    return " ".join(words[start : start + count])


def lognormal_tokens(chance: random.Random) -> int:
    """Return the length of an answer: median 60, 99th percentile 600."""
    tokens = round(chance.lognormvariate(math.log(MEDIAN_TOKENS), LOGNORMAL_SIGMA))
    return max(1, min(LONGEST_TOKENS, tokens))


def chat(content: str, tokens: int, *, system: str = "") -> Body:
    """Return a chat request that generates exactly so many tokens."""
    messages = [{"role": "system", "content": system}] if system else []
    return {
        "messages": [*messages, {"role": "user", "content": content}],
        "max_tokens": tokens,
        "min_tokens": tokens,
        "temperature": 0,
    }


def fixed(chance: random.Random, lines: int) -> Iterator[Body]:
    """About 150 prompt tokens and 32 new tokens."""
    for _ in range(lines):
        yield chat(passage(chance, 150), 32)


def lognormal(chance: random.Random, lines: int) -> Iterator[Body]:
    """Prompts of 100 to 800 tokens, lognormal answers."""
    for _ in range(lines):
        yield chat(passage(chance, chance.randint(100, 800)), lognormal_tokens(chance))


def shared_prefix(chance: random.Random, lines: int) -> Iterator[Body]:
    """Equal system prompts."""
    prompts = [passage(chance, SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    yield from _over_prompts(chance, lines, prompts, lambda prompt, _: prompt)


def shared_prefix_with_tails(chance: random.Random, lines: int) -> Iterator[Body]:
    """System prompts whose last line differs from request to request."""
    prompts = [passage(chance, SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    yield from _over_prompts(chance, lines, prompts, lambda prompt, line: f"{prompt}\nRequest {line} of a customer.")


def _over_prompts(
    chance: random.Random, lines: int, prompts: list[str], system: Callable[[str, int], str]
) -> Iterator[Body]:
    bodies = [
        chat(passage(chance, chance.randint(20, 60)), chance.randint(16, 48), system=system(prompts[line % 40], line))
        for line in range(lines)
    ]
    chance.shuffle(bodies)
    yield from bodies


def few_shot(chance: random.Random, lines: int) -> Iterator[Body]:
    """30 sets of examples of 1,200 tokens at the start of the first user message, shuffled."""
    examples = [passage(chance, 1200) for _ in range(30)]
    for _ in range(lines):
        question = passage(chance, chance.randint(20, 60))
        yield chat(f"{chance.choice(examples)}\n\n{question}", chance.randint(16, 48))


def documents(chance: random.Random, lines: int) -> Iterator[Body]:
    """Documents of 600 to 1,500 tokens, each shared by 2 to 8 neighbours, before the question."""
    left, document = 0, ""
    for _ in range(lines):
        if not left:
            left, document = chance.randint(2, 8), passage(chance, chance.randint(600, 1500))
        left -= 1
        yield chat(f"{document}\n\n{passage(chance, chance.randint(10, 40))}", chance.randint(16, 96))


def duplicates(chance: random.Random, lines: int) -> Iterator[Body]:
    """Lognormal lines, of which every tenth repeats an earlier one."""
    seen: list[Body] = []
    for number, body in enumerate(lognormal(chance, lines)):
        if number % 10 == 9:
            yield chance.choice(seen)
        else:
            yield body
            seen.append(body)


def long_rows(chance: random.Random, lines: int) -> Iterator[Body]:
    """Lognormal lines, of which every hundredth has 4,000 prompt tokens and 2,000 new tokens."""
    for number, body in enumerate(lognormal(chance, lines)):
        yield chat(passage(chance, 4000), LONGEST_TOKENS) if number % 100 == 99 else body


def embeddings(chance: random.Random, lines: int) -> Iterator[Body]:
    """Texts of 20 to 400 tokens."""
    for _ in range(lines):
        yield {"input": passage(chance, chance.randint(20, 400))}


def poisoned(chance: random.Random, lines: int) -> Iterator[Body]:
    """Lognormal lines, of which the one in the middle ends the simulated engine."""
    for number, body in enumerate(lognormal(chance, lines)):
        fault = {"vllm_xargs": {"simulated_fault": "exit"}} if number == lines // 2 else {}
        yield {**body, **fault}


def large_rows(chance: random.Random, lines: int) -> Iterator[Body]:
    """Lines of 10 MB, nearly all of it in metadata that the model does not see."""
    filler = passage(chance, 20_000)
    for body in lognormal(chance, lines):
        yield {**body, "metadata": {"filler": (filler * (LARGE_ROW_BYTES // len(filler)))}}


# Rows that share a prefix occupy little of the KV cache if they run together. A limit for rows that share nothing would
# hold back every order that groups them.
_SHARING_ROW_TOKENS: Final = 600
WORKLOADS: Final[Mapping[str, Workload]] = {
    "fixed": Workload(bodies=fixed, description="150 prompt tokens, 32 new tokens", mean_row_tokens=180),
    "lognormal": Workload(bodies=lognormal, description="lognormal lengths"),
    "shared-prefix": Workload(
        bodies=shared_prefix, description="40 equal system prompts, shuffled", mean_row_tokens=_SHARING_ROW_TOKENS
    ),
    "shared-prefix-tails": Workload(
        bodies=shared_prefix_with_tails,
        description="40 system prompts with differing last lines, shuffled",
        mean_row_tokens=_SHARING_ROW_TOKENS,
    ),
    "few-shot": Workload(
        bodies=few_shot, description="30 sets of examples in the user message", mean_row_tokens=_SHARING_ROW_TOKENS
    ),
    "documents": Workload(
        bodies=documents, description="documents shared by neighbours", mean_row_tokens=_SHARING_ROW_TOKENS
    ),
    "duplicates": Workload(bodies=duplicates, description="lognormal lengths, 10 % duplicates"),
    "long-rows": Workload(
        bodies=long_rows, description="lognormal lengths, 1 % very long", max_model_len=8192, mean_row_tokens=900
    ),
    "embeddings": Workload(bodies=embeddings, description="texts to embed", endpoint=EMBEDDINGS, mean_row_tokens=210),
    "poisoned": Workload(bodies=poisoned, description="lognormal lengths, one row ends the engine"),
    "large-rows": Workload(bodies=large_rows, description="lines of 10 MB"),
}


def write_workload(path: Path, name: str, lines: int, *, model: str, seed: int = 1) -> None:
    """Write an input file.

    Args:
        path: the file.
        name: the workload.
        lines: the number of lines.
        model: the model id of every line.
        seed: equal seeds produce equal files.
    """
    workload = WORKLOADS[name]
    with path.open("w") as file:
        for number, body in enumerate(workload.bodies(random.Random(seed), lines)):  # noqa: S311 - no secrets
            line = {
                "custom_id": f"r{number}",
                "method": "POST",
                "url": workload.endpoint,
                "body": {"model": model, **body},
            }
            file.write(json.dumps(line) + "\n")
