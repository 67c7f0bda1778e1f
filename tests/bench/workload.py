"""The lines of the bench: chat requests of about 150 prompt tokens and exactly 32 new ones."""

import json
import random
from pathlib import Path

WORDS_PER_PROMPT = 70
NEW_TOKENS = 32
SEED = 1


def write_workload(path: Path, lines: int, model: str) -> None:
    """Writes the same lines for the same arguments; the prompts are passages of Python's own documentation."""
    from pydoc_data.topics import topics

    words = " ".join(topics[name] for name in sorted(topics)).split()
    choose = random.Random(SEED)  # noqa: S311 - passages, no secrets
    with path.open("w") as file:
        for number in range(lines):
            start = choose.randrange(len(words) - WORDS_PER_PROMPT)
            passage = " ".join(words[start : start + WORDS_PER_PROMPT])
            body = {
                "model": model,
                "messages": [{"role": "user", "content": passage}],
                "max_tokens": NEW_TOKENS,
                "min_tokens": NEW_TOKENS,
                "temperature": 0,
            }
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
