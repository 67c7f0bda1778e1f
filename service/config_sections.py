"""Sections of configuration files: documented keys, and what pydantic found wrong as paths and messages.

``models.yaml`` and the stack file are both made of sections. Each key has a meaning, an example and a unit, from which
error messages and docs/configuration.md are made.
"""

import difflib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

Step = int | str

_SHOWN_LENGTH: Final = 60
# A value of these keys may hold a password by mistake.
_NEVER_SHOWN: Final = frozenset({"url", "ca_bundle", "base_url", "endpoint_url", "kubeconfig", "access_key_id"})


class Section(BaseModel):
    """Keys of a configuration file: unknown keys are errors, and no value is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    RENAMED: ClassVar[Mapping[str, str]] = {}
    """Today's name of keys that had another one."""


def key(meaning: str, example: Any = None, *, default: Any = ..., unit: str = "") -> Any:
    """Define a key of a section with its documentation. A key without a default is required."""
    return Field(default, description=f"{meaning} ({unit})" if unit else meaning, examples=[example])


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something wrong in a configuration file.

    Attributes:
        path: keys and indexes: ``("models", 3, "engine_args", "dtype")``.
        message: what is wrong, then what to do.
    """

    path: tuple[Step, ...]
    message: str

    def __str__(self) -> str:
        """Format as ``models[3].engine_args.dtype: message``."""
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path).removeprefix(".")
        return f"{path or 'the file'}: {self.message}"


def problems_of(error: ValidationError, annotation: Any, value: Any, *, at: tuple[Step, ...] = ()) -> list[Problem]:
    """Describe each error of a validation.

    Args:
        error: raised for ``value``.
        annotation: the type that the value was validated against, a section or a collection of sections.
        value: the value.
        at: the path of the value in the file.
    """
    problems = []
    for details in error.errors():
        steps = list(_walk(details["loc"], annotation, value))
        path = (*at, *(step for step, _ in steps))
        step, section = steps[-1] if steps else ("", None)
        field = section.model_fields.get(str(step)) if section else None
        shown = repr(details["input"])
        shown = shown if len(shown) <= _SHOWN_LENGTH else f"{shown[:_SHOWN_LENGTH]}…"
        match details["type"]:
            case "extra_forbidden" if section:
                renamed = section.RENAMED.get(str(step))
                known = list(section.model_fields)
                message = f"was renamed; use {renamed}" if renamed else unknown_key(str(step), known)
            case "missing":
                message = f"is required{key_documentation(str(step), field) if field else ''}"
            case "union_tag_invalid" | "union_tag_not_found":
                path = (*path, "kind")
                options = sections_of(field.annotation if field else annotation)
                allowed = [str(kind) for option in options for kind in kinds(option)]
                kind = details["input"].get("kind") if isinstance(details["input"], Mapping) else None
                given = f", not {kind!r}" if kind is not None else ""
                message = f"must be {', '.join(allowed[:-1])} or {allowed[-1]}{given}"
            case "model_type" | "model_attributes_type" | "dict_type":
                message = f"must be a mapping of keys to values, not {shown}"
            case _:
                message = details["msg"].removeprefix("Value error, ")
                given = "" if step in _NEVER_SHOWN or repr(details["input"]) in message else f", not {shown}"
                message = f"{message[:1].lower()}{message[1:]}{given}"
        problems.append(Problem(path=path, message=message))
    return problems


def unknown_key(name: str, known: list[str], *, kind: str = "key") -> str:
    """Return the message for a name that does not exist, with the nearest one that does or all of them."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known {kind}s: {', '.join(known)}"
    return f"{f'{name!r} ' if kind != 'key' else ''}is not a known {kind}; {hint}"


def _walk(location: tuple[Step, ...], annotation: Any, value: Any) -> Iterator[tuple[Step, type[Section] | None]]:
    """Yield each key and index of pydantic's location with the section that it belongs to.

    Where ``kind`` selects one of several sections, pydantic's location holds the kind too. It is no key, and left out.
    """
    for step in location:
        options = sections_of(annotation, in_collections=False)
        section = options[0] if len(options) == 1 else None
        if len(options) > 1 and isinstance(value, Mapping):
            section = next((option for option in options if value.get("kind") in kinds(option)), None)
        if len(options) > 1 and section and step in kinds(section):
            annotation = section
            continue
        yield step, section
        if section is not None:
            field = section.model_fields.get(str(step))
            annotation = field.annotation if field else extra_type(section)
        else:
            annotation = next((part for part in reversed(get_args(annotation)) if part is not type(None)), None)
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            value = None


def sections_of(annotation: Any, *, in_collections: bool = True) -> list[type[Section]]:
    """Return the sections in a key's type, by default also those in a list or mapping; empty for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType, Annotated) or (in_collections and origin in (list, tuple, dict)):
        parts = get_args(annotation)
        return [section for part in parts for section in sections_of(part, in_collections=in_collections)]
    return []


def extra_type(section: type[Section]) -> type[Section] | None:
    """Return the section of keys without a field, as of GPU pools; None if such keys are errors."""
    found = get_args(section.__annotations__.get("__pydantic_extra__"))
    return found[1] if found else None


def kinds(section: type[Section]) -> tuple[Any, ...]:
    """Return the values of ``kind`` that select this section; empty where it has no ``kind``."""
    field = section.model_fields.get("kind")
    return get_args(field.annotation) if field else ()


def key_documentation(name: str, field: FieldInfo) -> str:
    """Return the meaning of a key, to append to a message."""
    if sections_of(field.annotation):
        return f"; it is a section, see docs/configuration.md, {name}"
    return f": {field.description}"
