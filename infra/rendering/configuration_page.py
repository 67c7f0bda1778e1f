"""Generate docs/configuration.md from the schema: ``python -m infra.rendering.configuration_page [--check]``."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from infra.rendering.generated_page import write_or_check
from infra.stack_file.secret_keys import SECRET_KEYS
from infra.stack_file.sections import StackFile
from ray_job.contract.accelerators import ACCELERATORS, capability_text
from service.config_sections import Section, extra_type, kinds, sections_of

PAGE: Final = Path(__file__).parents[2] / "docs" / "configuration.md"
MODULE: Final = "infra.rendering.configuration_page"

_HEAD: Final = f"""\
# Configuration

All keys of a stack file, `Pulumi.<stack>.yaml`. `python -m {MODULE}` generates this page.

In the stack file, each key is below `config:` with the project before it, as in `cloister:customer: acme`. A section is
a mapping of keys to values. `pulumi preview` checks the whole file before it asks for any resource and reports all
errors in one message. Keys that are not on this page are errors. [docs/stacks](stacks) has complete files, and the
[how-to guides](README.md#how-to-guides) explain how to work with them.
"""
_SECRETS: Final = """\
## Secrets

Secrets are separate keys, so that a preview shows everything else. A secret in plain text is an error. Set each with
`pulumi config set --secret cloister:<key>`.

| key | meaning | required | example |
|---|---|---|---|
"""
_ACCELERATORS: Final = """\
## Accelerators

The names that `accelerator` in `models` and the GPU pools in `node_pools` can have. Memory is what the driver reports;
figures in brackets are nominal. Data types and quantizations follow from the compute capability: bfloat16 needs 8.0.
The driver is the oldest branch of NVIDIA's that the image runs with; 580 is the last one for V100. `accelerators` adds
rows for one stack.

| name | memory (MiB) | compute capability | image | driver | resource |
|---|---|---|---|---|---|
"""
_PLAIN_TYPES: Final = {
    "Cidr": "a network (CIDR)",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
}


def page() -> str:
    """Return the whole page."""
    secrets = "".join(
        f"| `{secret.name}` | {secret.meaning} | {secret.needed} | `{secret.example}` |\n"
        for secret in SECRET_KEYS.values()
    )
    rows = ""
    for row in ACCELERATORS.values():
        memory = f"({row.memory_mib:,})" if row.is_nominal else f"{row.memory_mib:,}"
        capability = capability_text(row.capability) if row.capability else ""
        cells = (f"`{row.name}`", memory if row.memory_mib else "", capability, f"`ray_{row.image_variant}`")
        driver = f"from {row.min_driver}" if row.min_driver else ""
        rows += f"| {' | '.join(cells)} | {driver} | {f'`{row.resource}`' if row.resource else ''} |\n"
    return "\n".join([_HEAD, _SECRETS + secrets, *_section("", StackFile, {}), _ACCELERATORS + rows])


def _section(path: str, section: type[Section], written: dict[type[Section], str]) -> Iterator[str]:
    """Yield one section and then those in it.

    Args:
        path: the path of the section's key; empty for the file itself.
        section: the section.
        written: the paths of the sections that the page has already, to add to.
    """
    if written.get(section) == path:
        return
    which = kinds(section)
    yield f"## {f'`{path}`' if path else 'All sections'}{f', kind {which[0]}' if which and path else ''}\n"
    if section in written:
        yield f"The same keys as `{written[section]}`.\n"
        return
    written[section] = path
    if path:
        yield f"{(section.__doc__ or '').strip()}\n"
    yield "| key | type | default | meaning | example |"
    yield "|---|---|---|---|---|"
    for name, field in section.model_fields.items():
        yield _row(name, field)
    if extra := extra_type(section):
        yield f"| an accelerator | section | none | {(extra.__doc__ or '').strip().splitlines()[0]} |  |"
    yield ""
    for name, field in section.model_fields.items():
        suffix = {dict: ".<name>", list: "[]"}.get(_container(field.annotation), "")
        for inner in sections_of(field.annotation):
            yield from _section(f"{path}.{name}{suffix}" if path else f"{name}{suffix}", inner, written)
    if extra:
        yield from _section(f"{path}.<accelerator>", extra, written)


def _row(name: str, field: FieldInfo) -> str:
    """Return the row of a key: its type, default, meaning and example."""
    sections = sections_of(field.annotation)
    example = (field.examples or [""])[0]
    shown = "" if sections else f"`{example if isinstance(example, str) else json.dumps(example)}`"
    if sections:
        kind = {dict: "mapping of sections", list: "list of sections"}.get(_container(field.annotation), "section")
    else:
        bounds = [f"from {value:,}" for rule in field.metadata if (value := getattr(rule, "ge", None)) is not None]
        bounds += [f"to {value:,}" for rule in field.metadata if (value := getattr(rule, "le", None)) is not None]
        kind = " ".join([_type_name(field.annotation), *bounds])
    meaning = field.description or ""
    if sections and field.description == "see below":
        one = len(sections) == 1
        meaning = (sections[0].__doc__ or "").strip().splitlines()[0] if one else "one of the kinds below"
    value = field.default
    if field.is_required():
        default = "required"
    elif isinstance(value, Section):
        changed = value.model_dump(exclude_defaults=True)
        default = f"`{json.dumps(changed)}`" if changed else "its defaults"
    else:
        default = "none" if value is None else f"`{json.dumps(value)}`"
    return f"| `{name}` | {kind} | {default} | {meaning} | {shown} |"


def _type_name(annotation: Any) -> str:
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if get_origin(annotation) in (list, tuple):
        return "list of texts"
    if get_origin(annotation) is dict:
        return "mapping"
    return _type_name(parts[0]) if parts else _PLAIN_TYPES.get(getattr(annotation, "__name__", ""), "text")


def _container(annotation: Any) -> Any:
    """Return ``dict`` or ``list`` for a type of several values, with or without ``Annotated``."""
    return get_origin(get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation)


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page(), sys.argv[1:], module=MODULE))
