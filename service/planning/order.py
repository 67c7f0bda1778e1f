"""The order in which the lines of a batch run, and the lines that share an answer. Pure functions.

Lines whose prompts begin alike run one after the other, while the engine's cache still holds what they share. Prompts
are compared by hashes of their beginnings, so a system prompt whose last line differs still counts as shared. Among
groups, and inside a group, long rows run first: a row that begins last must not keep the engine waiting.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

# Where the hashed beginnings of a prompt end, in characters. A token has about four, and vLLM's cache keeps blocks of
# 16 tokens on GPUs.
PREFIX_ENDS: Final = (64, 128, 256, *range(512, 16_385, 512))
HASH_BYTES: Final = 4
# Characters of a line that take about as long to read as one token takes to generate.
CHARACTERS_PER_STEP: Final = 64
BYTES_PER_TOKEN: Final = 4
# Of a line that names no limit.
USUAL_OUTPUT_TOKENS: Final = 256
# No model generates more for one line. Without it, the tokens of a line could exceed a bigint of Postgres.
_MOST_OUTPUT_TOKENS: Final = 1 << 24
# orjson reads integers of more than 64 bits as floats, so that two of them can become equal.
_LONG_INTEGER: Final = re.compile(rb"\d{19}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Facts about one line that the plan depends on.

    Attributes:
        prefix: hashes of the beginnings of its prompt, ``HASH_BYTES`` each: equal beginnings have equal hashes.
        cost: about how many steps of an engine it takes, as far as the line limits them.
        tokens: about how many tokens its prompt and its answer have.
        identity: equal for lines with the same body whose results do not depend on chance; else None.
    """

    prefix: bytes
    cost: int
    tokens: int
    identity: bytes | None = None


def line_traits(raw: bytes) -> Traits:
    """Return the traits of a line. A line that cannot be read has no prefix, and costs nothing."""
    prompt_tokens = max(1, len(raw) // BYTES_PER_TOKEN)
    try:
        parsed = orjson.loads(raw)
        body = parsed["body"]
    except (ValueError, KeyError, TypeError):
        return Traits(prefix=b"", cost=0, tokens=prompt_tokens)
    if not isinstance(body, dict):
        return Traits(prefix=b"", cost=0, tokens=prompt_tokens)
    has_input = "input" in body  # embeddings, which generate nothing
    limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens"))
    limit = next((max(0, limit) for limit in limits if isinstance(limit, int)), None)
    usual = 0 if has_input else USUAL_OUTPUT_TOKENS
    is_deterministic = body.get("temperature") == 0 or body.get("seed") is not None or has_input
    return Traits(
        prefix=_prefix(body),
        cost=(limit or 0) + len(raw) // CHARACTERS_PER_STEP,
        tokens=prompt_tokens + (usual if limit is None else min(limit, _MOST_OUTPUT_TOKENS)),
        identity=_identity(raw, [parsed.get("url"), body]) if is_deterministic else None,
    )


def _identity(raw: bytes, request: list[Any]) -> bytes:
    """Return a digest that is equal for equal requests."""
    try:
        text = b"" if _LONG_INTEGER.search(raw) else orjson.dumps(request, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # deeper than orjson writes
        text = b""
    if not text:
        parsed = json.loads(raw)
        text = json.dumps([parsed.get("url"), parsed["body"]], sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=16).digest()


def _prefix(body: Mapping[str, Any]) -> bytes:
    """Hash the beginnings of what the chat template makes of a body, or of its prompt."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    hashes = b""
    start = 0
    text = ""
    for piece in _prompt_pieces(body):
        text += piece
        for end in PREFIX_ENDS[len(hashes) // HASH_BYTES :]:
            if len(text) < end:
                break
            digest.update(text[start:end].encode())
            hashes += digest.digest()
            start = end
        if start == PREFIX_ENDS[-1]:
            break
    return hashes


def _prompt_pieces(body: Mapping[str, Any]) -> Iterator[str]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        yield _text(body.get("prompt", ""))
        return
    if body.get("tools"):
        yield _text(body["tools"])
    for message in messages:
        if isinstance(message, dict):
            yield f"\0{message.get('role')}\0{_text(message.get('content'))}"


def _text(content: Any) -> str:
    """Return the beginning of a text, or of any other value as JSON."""
    if not isinstance(content, str):
        try:
            content = orjson.dumps(content, option=orjson.OPT_SORT_KEYS).decode()
        except TypeError:  # deeper than orjson writes
            content = json.dumps(content, sort_keys=True)
    text: str = content[: PREFIX_ENDS[-1]]
    return text


def execution_groups(traits: Sequence[Traits]) -> list[list[int]]:
    """Return the indices of lines in the order of execution, in groups that share a beginning.

    In a group, lines that share more of their beginning are closer. Otherwise long rows come first; rows of about the
    same length keep their order.
    """
    by_prefix = sorted(range(len(traits)), key=lambda index: traits[index].prefix)
    shared = [_shared(traits[one].prefix, traits[other].prefix) for one, other in itertools.pairwise(by_prefix)]
    groups: list[list[int]] = []
    branches: dict[int, bytes] = {}
    for position, index in enumerate(by_prefix):
        before = shared[position - 1] if position else 0
        after = shared[position] if position < len(shared) else 0
        # The longest beginning that another line has too.
        branches[index] = traits[index].prefix[: max(before, after)]
        if before:
            groups[-1].append(index)
        else:
            groups.append([index])

    def length(index: int) -> int:
        return traits[index].cost.bit_length()

    for group in groups:
        group.sort(key=lambda index: (branches[index], -length(index), index))
    groups.sort(key=lambda group: (-max(map(length, group)), min(group)))
    return groups


def _shared(one: bytes, other: bytes) -> int:
    """Return how many bytes of whole hashes two prefixes have in common at their beginning."""
    if one[:HASH_BYTES] != other[:HASH_BYTES]:
        return 0
    low, high = 1, min(len(one), len(other)) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[: middle * HASH_BYTES] == other[: middle * HASH_BYTES] else (low, middle - 1)
    return low * HASH_BYTES if one else 0
