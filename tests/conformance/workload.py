"""Lines and files that the suite sends."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
EMBEDDINGS: Final = "/v1/embeddings"
NO_FILE: Final = "file-00000000000000000000000000000000"

# Any string is a valid custom_id and must return unchanged.
_CUSTOM_IDS: Final = (
    "plain", "0", "ünïcödé-日本語", "emoji 🦜", 'quote " and backslash \\', "tab\tand line break\n", "a" * 64,
    "</script>",
)  # fmt: skip
_FILLERS: Final = 8


def line(custom_id: str, body: Mapping[str, Any], url: str = CHAT) -> dict[str, Any]:
    """Return one request of an input file."""
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id: str, model: str, **options: Any) -> dict[str, Any]:
    """Return one chat request of a few tokens."""
    messages = [{"role": "user", "content": "Say something short, in German: Grüße aus Köln."}]
    return line(custom_id, {"model": model, "messages": messages, "max_tokens": 4, **options})


def jsonl(lines: Iterable[Mapping[str, Any] | bytes]) -> bytes:
    """Return a JSONL file; lines given as bytes are not changed."""
    rows = (row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in lines)
    return b"".join(row + b"\n" for row in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """An input file, and the requests that an engine answers and refuses, in the order of the file."""

    content: bytes
    answered: tuple[str, ...]
    refused: tuple[str, ...]


def main_workload(model: str) -> Workload:
    """Return about 20 chat requests: unusual custom ids, some options, and three that only the engine refuses."""
    options: dict[str, dict[str, Any]] = {
        "two choices": {"n": 2},
        "one token": {"max_tokens": 1},
        "all roles": {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi."},
                {"role": "assistant", "content": "Hi!"},
                {"role": "user", "content": "And now?"},
            ]
        },
    }
    refused: dict[str, dict[str, Any]] = {
        "negative temperature": {"temperature": -1},
        "top_p of 7": {"top_p": 7},
        "negative max_tokens": {"max_tokens": -5},
    }
    plain: dict[str, dict[str, Any]] = {name: {} for name in _CUSTOM_IDS}
    fillers: dict[str, dict[str, Any]] = {f"filler-{number}": {} for number in range(_FILLERS)}
    # Refused requests are placed between answered ones.
    first, *others = refused
    ordered = plain | {first: refused[first]} | options | {name: refused[name] for name in others} | fillers
    return Workload(
        content=jsonl(chat(name, model, **changes) for name, changes in ordered.items()),
        answered=tuple(name for name in ordered if name not in refused),
        refused=tuple(name for name in ordered if name in refused),
    )


def unusual_but_valid(model: str) -> bytes:
    """Return a valid file with a byte order mark, CRLF, blank lines, spaces around lines, and no last line break."""
    first, second, third = (json.dumps(chat(f"unusual-{number}", model)).encode() for number in range(3))
    return b"\xef\xbb\xbf" + first + b"\r\n\r\n" + second + b"\n\n  " + third + b"  \r\n\r\n  "
