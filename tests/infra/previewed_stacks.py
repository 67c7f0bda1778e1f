"""The stack files of the repository, and a way to preview one, as it is or with changes."""

import copy
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from infra.config import StackConfig, parse_config
from infra.program import run
from infra.recording import Recording, record
from infra.stack_file import StackFileText, read_stack_file

ROOT = Path(__file__).parents[2]
FILES = (ROOT / "Pulumi.dev.yaml", *sorted((ROOT / "docs" / "stacks").glob("Pulumi.*.yaml")))
STACKS = tuple(path.stem.removeprefix("Pulumi.") for path in FILES)


def stack_text(name: str = "dev") -> StackFileText:
    return read_stack_file(FILES[STACKS.index(name)])


def changed(name: str = "dev", **sections: Any) -> dict[str, Any]:
    """The values of a stack file with whole keys replaced, or taken out where the value is None."""
    values = copy.deepcopy(dict(stack_text(name).values)) | sections
    return {key: value for key, value in values.items() if value is not None}


def parse(values: Mapping[str, Any], secret_keys: frozenset[str] | None = None) -> StackConfig:
    secrets = stack_text().secret_keys if secret_keys is None else secret_keys
    return parse_config(values, secret_keys=secrets, stack="dev")


def preview_values(values: Mapping[str, Any], secret_keys: frozenset[str]) -> Recording:
    """What `pulumi preview` would ask for; the values as the CLI hands them over."""
    config = {
        f"cloister:{key}": value if isinstance(value, str) else json.dumps(value) for key, value in values.items()
    }
    return record(run, config=config, secret_keys=frozenset(f"cloister:{key}" for key in secret_keys), stack="dev")


@cache
def preview(name: str = "dev") -> Recording:
    text = stack_text(name)
    return preview_values(text.values, text.secret_keys)
