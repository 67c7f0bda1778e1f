"""The stack files of the repository, and previews of them, unchanged or with changes."""

import copy
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from infra.program import run_unchecked
from infra.rendering.recording import Recording, record
from infra.rendering.render import record_stack
from infra.stack_file.reading import StackConfig, StackFileText, parse_config, read_stack_file

ROOT = Path(__file__).parents[2]
FILES = (ROOT / "Pulumi.dev.yaml", *sorted((ROOT / "docs" / "stacks").glob("Pulumi.*.yaml")))
STACKS = tuple(path.stem.removeprefix("Pulumi.") for path in FILES)

PLATFORM_STACK = "platform"
PLATFORMS = {
    "organization/cloister/platform": {
        "kuberay_namespace": "kuberay-system",
        "jobs_namespaces": ["cloister-acme-prod-jobs", "cloister-globex-prod-jobs"],
    }
}
STACKS_OF_CUSTOMERS = tuple(name for name in STACKS if name != PLATFORM_STACK)
AWS_STACK = "aws-a10g"
STACKS_WITH_PASSWORDS = tuple(name for name in STACKS_OF_CUSTOMERS if name != AWS_STACK)


def customer_text(customer: str) -> StackFileText:
    """Return the example of a customer on a platform, for another customer."""
    text = stack_text("customer-acme")
    host = {"host": f"batch.{customer}.example", "controller": "traefik", "tls": {"cluster_issuer": "host-ca"}}
    values = {**text.values, "customer": customer, "api": {"ingress": host}}
    return StackFileText(stack=f"customer-{customer}", values=values, secret_keys=text.secret_keys)


def stack_text(name: str = "dev") -> StackFileText:
    return read_stack_file(FILES[STACKS.index(name)])


def changed(name: str = "dev", **sections: Any) -> dict[str, Any]:
    """Return the values of a stack file with keys replaced, or removed if the value is None."""
    values = copy.deepcopy(dict(stack_text(name).values)) | sections
    return {key: value for key, value in values.items() if value is not None}


def parse(values: Mapping[str, Any], secret_keys: frozenset[str] | None = None) -> StackConfig:
    secrets = stack_text().secret_keys if secret_keys is None else secret_keys
    return parse_config(values, secret_keys=secrets, stack="dev")


def preview_values(
    values: Mapping[str, Any], secret_keys: frozenset[str], answers: Mapping[str, Mapping[str, Any]] | None = None
) -> Recording:
    """Record what `pulumi preview` requests, with the values as the CLI passes them.

    ``answers`` are results of functions of providers by their tokens.
    """
    config = {
        f"cloister:{key}": value if isinstance(value, str) else json.dumps(value) for key, value in values.items()
    }
    encrypted = frozenset(f"cloister:{key}" for key in secret_keys)
    if answers:
        return record(run_unchecked, config=config, secret_keys=encrypted, stack="dev", answers=answers)
    return _record(tuple(config.items()), encrypted)


@cache
def _record(config: tuple[tuple[str, str], ...], secret_keys: frozenset[str]) -> Recording:
    return record(run_unchecked, config=dict(config), secret_keys=secret_keys, stack="dev", references=PLATFORMS)


@cache
def preview(name: str = "dev") -> Recording:
    return record_stack(FILES[STACKS.index(name)])
