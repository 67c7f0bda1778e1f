"""Compares two response bodies. Only ids, times and what the prefix cache held may differ."""

from collections.abc import Iterator
from typing import Any

# These differ between two runs of the same request, at any depth of the body.
VOLATILE_KEYS = frozenset({"id", "created", "request_id", "cached_tokens", "created_cache_tokens"})


def differences(expected: Any, actual: Any, path: str = "$") -> Iterator[str]:
    """Yield every place where two JSON values differ, as ``path: expected … got …``."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in sorted(expected.keys() | actual.keys()):
            yield from _member_differences(expected, actual, key, path)
    elif isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            yield f"{path}: expected {len(expected)} items, got {len(actual)}"
        for index, (one, other) in enumerate(zip(expected, actual, strict=False)):
            yield from differences(one, other, f"{path}[{index}]")
    elif type(expected) is not type(actual) or expected != actual:
        yield f"{path}: expected {_shortened(expected)}, got {_shortened(actual)}"


def _member_differences(expected: dict[str, Any], actual: dict[str, Any], key: str, path: str) -> Iterator[str]:
    if key not in actual:
        yield f"{path}.{key}: missing, expected {_shortened(expected[key])}"
    elif key not in expected:
        yield f"{path}.{key}: not expected, got {_shortened(actual[key])}"
    elif key not in VOLATILE_KEYS:
        yield from differences(expected[key], actual[key], f"{path}.{key}")
    elif type(expected[key]) is not type(actual[key]):
        yield f"{path}.{key}: expected a {type(expected[key]).__name__}, got a {type(actual[key]).__name__}"


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
