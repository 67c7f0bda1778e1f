"""docs/configuration.md, made from the schema: ``python -m infra.config_reference [--check]``."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from infra.config_schema import SECRET_KEYS, StackFile, kinds, sections_of, unit_of
from infra.config_sections import Section
from infra.generated_page import write_or_check

PAGE: Final = Path(__file__).parents[1] / "docs" / "configuration.md"

_HEAD: Final = """\
# Configuration

All keys of a stack file, `Pulumi.<stack>.yaml`. Made from the schema by `python -m infra.config_reference`; a test
compares the two. Every key stands below `config:` with the project before it, as in `cloister:customer: acme`; a
section is a mapping. A stack file is read once, before any resource: `pulumi preview` tells every error in one message,
and a key that is not here is an error. [docs/stacks](stacks) has whole files, [operate.md](operate.md) says what to do
with them.
"""
_NAMES: Final = {
    "Cidr": "a network (CIDR)",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "str": "text",
}


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_secrets(), *_section("", StackFile, {})])


def _secrets() -> Iterator[str]:
    yield "## Secrets\n"
    yield (
        "Keys of their own, so that a preview shows the rest. In plain text in the stack file they are an error; "
        "set each with `pulumi config set --secret cloister:<key>`.\n"
    )
    yield "| key | meaning | needed | for example |"
    yield "|---|---|---|---|"
    for secret in SECRET_KEYS.values():
        yield f"| `{secret.name}` | {secret.meaning} | {secret.needed} | `{secret.example}` |"
    yield ""


def _section(path: str, section: type[Section], written: dict[type[Section], str]) -> Iterator[str]:
    """One section and then those in it, each with the path of its keys.

    Args:
        path: of the section's key; empty for the file itself.
        section: the section.
        written: the paths of the sections that the page has already.
    """
    title = f"`{path}`" if path else "All sections"
    which = kinds(section)
    if written.get(section) == path:
        return
    yield f"## {title}{f', kind {which[0]}' if which and path else ''}\n"
    if section in written:
        yield f"The same keys as `{written[section]}`.\n"
        return
    written[section] = path
    if path:
        yield f"{(section.__doc__ or '').strip()}\n"
    yield "| key | type | default | meaning | for example |"
    yield "|---|---|---|---|---|"
    for name, field in section.model_fields.items():
        yield f"| `{name}` | {_type(field)} | {_default(field)} | {_meaning(field)} | {_example(field)} |"
    yield ""
    for name, field in section.model_fields.items():
        for inner in sections_of(field.annotation):
            yield from _section(f"{path}.{name}" if path else name, inner, written)


def _meaning(field: FieldInfo) -> str:
    sections = sections_of(field.annotation)
    meaning = field.description or ""
    if sections and meaning == "see below":
        return (sections[0].__doc__ or "").strip().splitlines()[0] if len(sections) == 1 else "one of the kinds below"
    return f"{meaning}{unit_of(field)}"


def _type(field: FieldInfo) -> str:
    if sections_of(field.annotation):
        return "section"
    bounds = [f"from {value:,}" for rule in field.metadata if (value := getattr(rule, "ge", None)) is not None]
    bounds += [f"to {value:,}" for rule in field.metadata if (value := getattr(rule, "le", None)) is not None]
    return " ".join([_name(field.annotation), *bounds])


def _name(annotation: Any) -> str:
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if get_origin(annotation) is list:
        return "list of mappings" if get_origin(parts[0]) is dict else "list of texts"
    if get_origin(annotation) is dict:
        return "mapping"
    if parts:
        return _name(parts[0])
    return _NAMES.get(getattr(annotation, "__name__", ""), "text")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, Section):
        value = value.model_dump(exclude_defaults=True) or "its own defaults"
        return value if isinstance(value, str) else f"`{json.dumps(value)}`"
    return "none" if value is None else f"`{json.dumps(value)}`"


def _example(field: FieldInfo) -> str:
    if sections_of(field.annotation):
        return ""
    example = (field.examples or [""])[0]
    return f"`{example if isinstance(example, str) else json.dumps(example)}`"


def main(arguments: list[str]) -> int:
    """Writes the page; with ``--check`` tells whether it is the one that is there, by the exit status."""
    return write_or_check(PAGE, page(), arguments, module="infra.config_reference")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
