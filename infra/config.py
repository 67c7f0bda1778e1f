"""The stack file, read once: every error of it in one message, before any resource.

Pulumi's configuration is read here and nowhere else.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pulumi
import yaml
from pulumi.runtime import config as pulumi_config
from pydantic import TypeAdapter, ValidationError

from infra.config_errors import described
from infra.config_neighbours import neighbour_problems
from infra.config_rules import RULES, Rule
from infra.config_schema import PROJECT, SECRET_KEYS, StackFile
from infra.config_sections import BundledObjectStore
from infra.naming import StackNames
from infra.stack_file import read_neighbours
from service.errors import SettingsError
from service.model_catalogue import Catalogue, parse_catalogue

_SEVERAL_LINES: Final = frozenset({"kubeconfig"})
_TEXT_KEYS: Final = ("customer", "environment", "log_level")


class ConfigError(Exception):
    """A stack file is wrong.

    Attributes:
        problems: one line each, starting with the key.
    """

    def __init__(self, problems: Iterable[str], *, stack: str) -> None:
        self.problems = tuple(problems)
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        super().__init__(f"the stack file Pulumi.{stack}.yaml is wrong (docs/configuration.md has all keys):{lines}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """A stack file that is right.

    Attributes:
        file: its sections.
        catalogue: ``models``, parsed as the service parses them.
        secrets: the secret keys' values by key.
        names: the names that follow from customer and environment.
    """

    file: StackFile
    catalogue: Catalogue
    secrets: Mapping[str, str] = field(repr=False)
    names: StackNames

    @property
    def models_yaml(self) -> str:
        """The model catalogue, as the service reads it."""
        return yaml.safe_dump({"models": self.file.models}, sort_keys=False, allow_unicode=True)

    def secret(self, name: str) -> pulumi.Output[str]:
        """A secret, as Pulumi keeps it: encrypted in the state and hidden in every display."""
        return pulumi.Output.secret(self.secrets[name])


def read_config() -> StackConfig:
    """Reads the stack that Pulumi runs.

    Raises:
        ConfigError: the stack file is wrong; the message lists every error.
    """
    # Config.get needs a key's name; only the map behind it tells the keys that nobody asked for.
    prefix = f"{PROJECT}:"
    values = {name.removeprefix(prefix): value for name, value in pulumi_config.CONFIG.get().items() if prefix in name}
    secret_keys = {name for name in values if pulumi_config.is_config_secret(prefix + name)}
    stack = pulumi.get_stack()
    # An inline program has no directory.
    directory: str | None = pulumi.get_root_directory()
    neighbours = read_neighbours(Path(directory), stack=stack) if directory else {}
    return parse_config(values, secret_keys=secret_keys, stack=stack, neighbours=neighbours)


def parse_config(
    values: Mapping[str, Any],
    *,
    secret_keys: Collection[str],
    stack: str,
    neighbours: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> StackConfig:
    """Checks a stack file.

    Args:
        values: by key without the project; text as Pulumi hands it over (sections as JSON), or parsed already.
        secret_keys: which of them Pulumi keeps as secrets.
        stack: the stack's name, for the message.
        neighbours: the values of other stack files by stack, of which some may go to the same cluster.

    Raises:
        ConfigError: see ``read_config``.
    """
    problems: list[str] = []
    secrets = {name: str(value) for name, value in values.items() if name in SECRET_KEYS}
    decoded = {name: _decoded(name, value) for name, value in values.items() if name not in SECRET_KEYS}
    problems += _misplaced_secrets(secrets, secret_keys, decoded)

    try:
        StackFile.model_validate(decoded)
    except ValidationError as error:
        problems += [described(details, decoded) for details in error.errors()]
    sections = _valid_sections(decoded)
    catalogue = _catalogue(sections.get("models"), problems)
    known = sections | {"secrets": frozenset(secrets)} | ({"catalogue": catalogue} if catalogue else {})
    for rule in RULES:
        problems += _told(rule, known)
    if catalogue is None:
        problems += _told_of_right_models(decoded.get("models"), known)
    problems += _unusable_secrets(secrets, sections.get("object_store"))
    problems += [f"{PROJECT}:{problem}" for problem in neighbour_problems(decoded, neighbours)]
    if problems or catalogue is None:
        raise ConfigError(dict.fromkeys(problems), stack=stack)
    file = StackFile.model_validate(decoded)
    names = StackNames(customer=file.customer, environment=file.environment)
    return StackConfig(file=file, catalogue=catalogue, secrets=secrets, names=names)


def _decoded(name: str, value: Any) -> Any:
    if not isinstance(value, str) or name in _TEXT_KEYS or name not in StackFile.model_fields:
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value  # the schema says what it should be


def _misplaced_secrets(
    secrets: Mapping[str, str], secret_keys: Collection[str], decoded: Mapping[str, Any]
) -> Iterable[str]:
    for name in secrets:
        if name not in secret_keys:
            yield (
                f"{PROJECT}:{name}: stands in the stack file in plain text; make a new one and set it with "
                f"`{_set_it(name)}`"
            )
        elif not secrets[name].strip():
            yield f"{PROJECT}:{name}: is empty; set it with `{_set_it(name)}`"
    for name in decoded:
        if name in secret_keys and name in StackFile.model_fields:
            yield (
                f"{PROJECT}:{name}: holds a secret, and a preview would hide all of it; "
                f"only these keys are secrets: {', '.join(SECRET_KEYS)}"
            )


def _unusable_secrets(secrets: Mapping[str, str], object_store: Any) -> Iterable[str]:
    """Secrets whose value cannot be used where it goes; the message does not repeat it."""
    for name in secrets.keys() - _SEVERAL_LINES:
        if not secrets[name].isprintable():
            yield f"{PROJECT}:{name}: has a line break or another control character; set it with `{_set_it(name)}`"
    key = secrets.get("object_store_secret_access_key", "")
    if isinstance(object_store, BundledObjectStore) and not re.fullmatch(r"[A-Za-z0-9-]*", key.strip()):
        yield (
            f"{PROJECT}:object_store_secret_access_key: the bundled object store takes letters, digits and hyphens "
            f"only; set it with `{_set_it('object_store_secret_access_key')}`"
        )


def _set_it(name: str) -> str:
    return SECRET_KEYS[name].command


def _valid_sections(decoded: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that are right by themselves: the rules between sections are told with the other errors."""
    valid: dict[str, Any] = {}
    for name, model_field in StackFile.model_fields.items():
        if name not in decoded:
            if not model_field.is_required():
                valid[name] = model_field.default
            continue
        adapter: TypeAdapter[Any] = TypeAdapter(StackFile.__annotations__[name])
        try:
            valid[name] = adapter.validate_python(decoded[name])
        except ValidationError:
            continue  # told already
    return valid


def _catalogue(models: Any, problems: list[str]) -> Catalogue | None:
    if models is None:
        return None
    try:
        return parse_catalogue({"models": models}, name=f"{PROJECT}:models")
    except SettingsError as error:
        problems += [f"{PROJECT}:{line.strip()}" for line in str(error).splitlines()[1:]]
        return None


def _told(rule: Rule, known: Mapping[str, Any]) -> Iterable[str]:
    """What one rule has to say; nothing where a section that it looks at is wrong itself."""
    check: Callable[..., Iterable[str]] = rule.check
    if all(name in known for name in rule.looks_at):
        return [f"{PROJECT}:{problem}" for problem in check(*(known[name] for name in rule.looks_at))]
    return []


def _told_of_right_models(models: Any, known: Mapping[str, Any]) -> Iterable[str]:
    """What the rules say of the models that are right by themselves, where another one is wrong."""
    right: dict[str, int] = {}
    for index, model in enumerate(models if isinstance(models, list) else []):
        try:
            alone = parse_catalogue({"models": [model]})
        except SettingsError:
            continue  # told already
        right.setdefault(next(iter(alone.models)), index)
    if not right:
        return
    places = list(right.values())
    some = {**known, "catalogue": parse_catalogue({"models": [models[index] for index in places]})}
    for rule in RULES:
        # Whether a secret has its model cannot be said without all of them.
        if "catalogue" in rule.looks_at and "secrets" not in rule.looks_at:
            for problem in _told(rule, some):
                yield re.sub(r"models\[(\d+)\]", lambda place: f"models[{places[int(place[1])]}]", problem)
