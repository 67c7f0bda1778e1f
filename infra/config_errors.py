"""What pydantic found in a stack file, in words: the key, what is wrong and what is allowed."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic_core import ErrorDetails

from infra.config_schema import PROJECT, SECRET_KEYS, StackFile, kinds, section_for, sections_of, unit_of
from infra.config_sections import Section

_SHOWN: Final = 60
# A value of these keys may hold a password by mistake.
_NEVER_SHOWN: Final = ("url", "endpoint_url", "kubeconfig", "access_key_id")


def described(details: ErrorDetails, file: Mapping[str, Any]) -> str:
    """One error in one line.

    Args:
        details: pydantic's error.
        file: the stack file, parsed.
    """
    steps = list(_walk(details["loc"], file))
    path, (step, section) = path_of(*(step for step, _ in steps)), steps[-1]
    match details["type"]:
        case "extra_forbidden":
            return f"{path}: there is no such key; {_nearest(str(step), section)}"
        case "missing":
            return f"{path}: is required: {_meaning(str(step), section, path)}"
        case "union_tag_invalid" | "union_tag_not_found":
            return f"{path}.kind: must be {_allowed_kinds(step, section)}{_not(details['input'], 'kind')}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{path}: must be a mapping of keys to values, not {_shown(details['input'])}"
    message = details["msg"].removeprefix("Value error, ")
    shown = f", not {_shown(details['input'])}"
    if step in _NEVER_SHOWN or repr(details["input"]) in message:
        shown = ""
    return f"{path}: {message[:1].lower()}{message[1:]}{shown}"


def path_of(*steps: int | str) -> str:
    """``("node_pools", "cpu", "nodes", 0)`` as ``cloister:node_pools.cpu.nodes[0]``."""
    joined = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return f"{PROJECT}:{joined.removeprefix('.')}"


def _walk(location: tuple[int | str, ...], value: Any) -> Iterator[tuple[int | str, type[Section] | None]]:
    """The keys and indexes of pydantic's location, each with the section that it is in.

    Pydantic puts the ``kind`` that it went by between them.
    """
    section: type[Section] | None = StackFile
    chosen_by_kind = False
    for step in location:
        if chosen_by_kind and isinstance(value, Mapping) and value.get("kind") == step:
            chosen_by_kind = False
            continue
        yield step, section
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            value = None
        field = section.model_fields.get(str(step)) if section else None
        sections = sections_of(field.annotation) if field else []
        section, chosen_by_kind = section_for(sections, value), len(sections) > 1


def _nearest(key: str, section: type[Section] | None) -> str:
    valid = list(section.model_fields) if section else []
    if section is StackFile:
        valid += list(SECRET_KEYS)
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(valid)}"


def _meaning(key: str, section: type[Section] | None, path: str) -> str:
    if section is None:
        return "docs/configuration.md says what it is"
    field = section.model_fields[key]
    if sections_of(field.annotation):
        return f"a section, see docs/configuration.md, {path}"
    return f"{field.description}{unit_of(field)}"


def _allowed_kinds(step: int | str, section: type[Section] | None) -> str:
    field = section.model_fields[str(step)] if section else None
    allowed = (
        [str(kind) for option in sections_of(field.annotation) if field for kind in kinds(option)] if field else []
    )
    return f"{', '.join(allowed[:-1])} or {allowed[-1]}"


def _not(value: Any, key: str) -> str:
    return f", not {_shown(value[key])}" if isinstance(value, Mapping) and key in value else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
