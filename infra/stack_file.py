"""Reads a stack file without the Pulumi CLI: for `make render` and for tests, which have no key to its secrets."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from infra.config_schema import PROJECT, SECRET_KEYS

SHOWN_SECRET: Final = "shown-in-place-of-a-secret"  # noqa: S105 - it is none
"""What stands for a secret's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFileText:
    """What a stack file holds.

    Attributes:
        stack: the stack's name, from the file's.
        values: by key without the project.
        secret_keys: those of them that are secrets.
    """

    stack: str
    values: Mapping[str, Any]
    secret_keys: frozenset[str]


def read_stack_file(path: Path, *, with_missing_secrets: bool = True) -> StackFileText:
    """Reads ``Pulumi.<stack>.yaml``; encrypted values become ``SHOWN_SECRET``.

    Args:
        path: the file.
        with_missing_secrets: put the secrets in that a stack always needs, where they have not been set yet.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no stack file.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    config = raw.get("config") if isinstance(raw, dict) else None
    if not config:
        raise ValueError(f"{path} is no stack file: it has no section `config`")
    prefix = f"{PROJECT}:"
    values = {str(key).removeprefix(prefix): value for key, value in config.items() if str(key).startswith(prefix)}
    secret_keys = {key for key, value in values.items() if isinstance(value, Mapping) and set(value) == {"secure"}}
    if with_missing_secrets:
        secret_keys |= _expected(values) - values.keys()
    return StackFileText(
        stack=path.stem.removeprefix("Pulumi."),
        values={**values, **dict.fromkeys(secret_keys, SHOWN_SECRET)},
        secret_keys=frozenset(secret_keys),
    )


def read_neighbours(directory: Path, *, stack: str) -> dict[str, Mapping[str, Any]]:
    """The values of the other stack files of a directory, by stack; files that cannot be read are left out.

    Args:
        directory: where ``Pulumi.yaml`` is.
        stack: the stack that they are the neighbours of.
    """
    neighbours: dict[str, Mapping[str, Any]] = {}
    for path in sorted(directory.glob("Pulumi.*.yaml")):
        with contextlib.suppress(OSError, ValueError):
            text = read_stack_file(path, with_missing_secrets=False)
            neighbours[text.stack] = text.values
    neighbours.pop(stack, None)
    return neighbours


def _expected(values: Mapping[str, Any]) -> set[str]:
    """The secrets that this stack needs, as far as a file that may be wrong tells."""
    expected = {name for name, secret in SECRET_KEYS.items() if secret.needed == "always"}
    store, images = values.get("object_store"), values.get("images")
    if isinstance(store, Mapping) and store.get("job_access_key_id"):
        expected.add("object_store_job_secret_access_key")
    if isinstance(images, Mapping) and images.get("pull_secret"):
        expected.add("registry_password")
    return expected
