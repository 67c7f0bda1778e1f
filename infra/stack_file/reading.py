"""Read a stack file: from Pulumi or from the YAML file, each section validated once, all errors in one message."""

import base64
import contextlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pulumi
import yaml
from pulumi.runtime import config as pulumi_config
from pydantic import TypeAdapter, ValidationError

from infra.capacity.pools import NodePool, of_customer
from infra.kubernetes.naming import PLATFORM, StackNames
from infra.stack_file.cluster_sections import NodePoolsSection
from infra.stack_file.layers import Layer, is_in_layer, layer_of, layer_problems
from infra.stack_file.neighbours import neighbour_problems
from infra.stack_file.rules import section_problems
from infra.stack_file.secret_keys import SECRET_KEYS, SHOWN_SECRET, secret_problems
from infra.stack_file.sections import PROJECT, StackFile
from ray_job.contract.accelerators import Accelerator
from service.config_sections import Problem, key_documentation, problems_of, unknown_key
from service.model_catalogue import (
    Catalogue,
    ModelEntry,
    accelerator_table,
    catalogue_yaml,
    parse_accelerators,
    parse_models,
)

_TEXT_KEYS: Final = ("customer", "environment", "log_level", "layer", "isolation")
# Models and accelerators are mappings and lists of sections: their parsers validate each of these once.
_ADAPTERS: Final[Mapping[str, TypeAdapter[Any]]] = {
    name: TypeAdapter(StackFile.__annotations__[name])
    for name in StackFile.model_fields
    if name not in ("models", "accelerators")
}
_KNOWN: Final = (*StackFile.model_fields, *SECRET_KEYS)


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
    """A valid stack file.

    Attributes:
        file: its sections.
        models: the entries of ``models`` by index.
        catalogue: the same models as the service and its jobs use them.
        accelerators: the accelerator table with the file's own rows.
        secrets: the values of secret keys.
        names: the names that follow from customer and environment.
    """

    file: StackFile
    models: Mapping[int, ModelEntry]
    catalogue: Catalogue
    accelerators: Mapping[str, Accelerator]
    secrets: Mapping[str, str] = field(repr=False)
    names: StackNames

    @property
    def models_yaml(self) -> str:
        """The model catalogue that the service's pods read."""
        file = self.file
        return catalogue_yaml(self.models, file.accelerators, file.prices, file.models_at_run_time)

    @property
    def pools(self) -> dict[str, NodePool]:
        """The node pools by name. With ``isolation: nodes`` they are the parts of the pools that are the customer's."""
        pools = self.file.node_pools.pools(self.accelerators)
        if self.file.isolation == "nodes":
            return {name: of_customer(pool, self.names.customer) for name, pool in pools.items()}
        return pools

    @property
    def docker_config(self) -> pulumi.Output[str] | None:
        """Content of a ``kubernetes.io/dockerconfigjson`` Secret; None if the registry requires no login."""
        login = self.file.images.pull_secret
        if login is None:
            return None
        token = base64.b64encode(f"{login.username}:{self.secrets['registry_password']}".encode()).decode()
        return pulumi.Output.secret(json.dumps({"auths": {login.registry: {"auth": token}}}, sort_keys=True))

    def secret(self, name: str) -> pulumi.Output[str]:
        """Return a secret as Pulumi keeps it: encrypted in the state and hidden in every display."""
        return pulumi.Output.secret(self.secrets[name])


def read_config() -> StackConfig:
    """Read the stack that Pulumi runs.

    Raises:
        ConfigError: the stack file is wrong; the message lists every error.
    """
    # Config.get needs the name of a key; only the map behind it has unknown keys too.
    prefix = f"{PROJECT}:"
    texts = {name.removeprefix(prefix): text for name, text in pulumi_config.CONFIG.get().items() if prefix in name}
    encrypted = {name for name in texts if pulumi_config.is_config_secret(prefix + name)}
    values: dict[str, Any] = dict(texts)
    for name in StackFile.model_fields.keys() & texts.keys() - set(_TEXT_KEYS):
        # Pulumi passes sections and numbers as JSON. Validation reports what other text should be.
        with contextlib.suppress(json.JSONDecodeError):
            values[name] = json.loads(texts[name])
    stack = pulumi.get_stack()
    # An inline program has no directory.
    directory: str | None = pulumi.get_root_directory()
    neighbours = read_neighbours(Path(directory), stack=stack) if directory else {}
    return parse_config(values, secret_keys=encrypted, stack=stack, neighbours=neighbours)


def parse_config(
    values: Mapping[str, Any],
    *,
    secret_keys: Collection[str],
    stack: str,
    neighbours: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> StackConfig:
    """Check a stack file.

    Args:
        values: by key without the project; sections as mappings and lists, not as JSON.
        secret_keys: the keys that Pulumi keeps as secrets.
        stack: the stack's name, for the message.
        neighbours: the values of the other stack files by stack.

    Raises:
        ConfigError: the stack file is wrong; the message lists every error.
    """
    layer = layer_of(values)
    lines = list(layer_problems(values, _KNOWN, layer))
    given = {name: value for name, value in values.items() if name not in _KNOWN or is_in_layer(name, layer)}
    secrets = {name: str(value) for name, value in given.items() if name in SECRET_KEYS}
    plain = {name: value for name, value in given.items() if name not in SECRET_KEYS}
    own, problems = parse_accelerators(plain.get("accelerators", {}))
    accelerators = accelerator_table(own)
    sections, found = _validated(plain, accelerators, layer)
    problems += found
    entries: dict[int, ModelEntry] = {}
    wrong_models: list[Problem] = []
    if "models" in plain:
        entries, wrong_models = parse_models(plain["models"], accelerators)
    catalogue = {entry.id: entry.catalogue_model() for entry in entries.values()}
    models = dict(zip(entries, catalogue.values(), strict=True))
    lines += [str(problem) for problem in (*problems, *wrong_models)]
    lines += [
        f"{name}: is a secret, which would hide the whole section from a preview; the only secrets are "
        f"{', '.join(SECRET_KEYS)}"
        for name in plain
        if name in secret_keys and name in StackFile.model_fields
    ]
    complete = None if wrong_models or not entries else entries
    required = [name for name in SECRET_KEYS if is_in_layer(name, layer)]
    lines += secret_problems(secrets, encrypted=secret_keys, known=required, sections=sections, models=complete)
    lines += section_problems(sections, models, accelerators)
    lines += neighbour_problems(plain, neighbours)
    if lines:
        raise ConfigError(dict.fromkeys(f"{PROJECT}:{line}" for line in lines), stack=stack)
    if sections.get("aws"):
        sections["network"] = sections["aws"].with_addresses(sections["network"])
    file = StackFile.model_construct(**sections, accelerators=own, models=list(entries.values()))
    return StackConfig(
        file=file,
        models=entries,
        catalogue=catalogue,
        accelerators=accelerators,
        secrets=secrets,
        names=PLATFORM if layer == "platform" else StackNames(customer=file.customer, environment=file.environment),
    )


def _validated(
    plain: Mapping[str, Any], accelerators: Mapping[str, Accelerator], layer: Layer
) -> tuple[dict[str, Any], list[Problem]]:
    """Validate each section of a layer, except models and accelerators, once.

    Returns:
        The valid ones by key, and the problems.
    """
    sections: dict[str, Any] = {}
    problems = [
        Problem(path=(name,), message=unknown_key(name, [*StackFile.model_fields, *SECRET_KEYS]))
        for name in plain
        if name not in StackFile.model_fields
    ]
    for name, model_field in StackFile.model_fields.items():
        if not is_in_layer(name, layer):
            continue
        if name not in plain:
            if model_field.is_required():
                problems.append(Problem(path=(name,), message=f"is required{key_documentation(name, model_field)}"))
            elif name in _ADAPTERS:
                sections[name] = model_field.default
            continue
        if name not in _ADAPTERS:
            continue
        value = plain[name]
        unknown: list[Problem] = []
        if name == "node_pools" and isinstance(value, Mapping):
            named = (
                str(pool)
                for pool, content in value.items()
                if isinstance(content, Mapping) and "accelerator" in content
            )
            known = [*NodePoolsSection.model_fields, *accelerators, *named]
            unknown = [
                Problem(path=(name, str(pool)), message=unknown_key(str(pool), known))
                for pool in value
                if pool not in known
            ]
            value = {pool: value[pool] for pool in value if pool in known}
        problems += unknown
        try:
            section = _ADAPTERS[name].validate_python(value, strict=True)
        except ValidationError as error:
            problems += problems_of(error, StackFile.__annotations__[name], value, at=(name,))
        else:
            if not unknown:
                sections[name] = section
    return sections, problems


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFileText:
    """Content of a stack file.

    Attributes:
        stack: the stack's name, from the name of the file.
        values: by key without the project.
        secret_keys: the keys that are secrets.
    """

    stack: str
    values: Mapping[str, Any]
    secret_keys: frozenset[str]


class _StackFileLoader(yaml.SafeLoader):
    """YAML loader that leaves days as text, as JSON has no days."""


_StackFileLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_stack_file(path: Path, *, with_missing_secrets: bool = True) -> StackFileText:
    """Read ``Pulumi.<stack>.yaml`` without the Pulumi CLI. Encrypted values become ``SHOWN_SECRET``.

    Args:
        path: the file.
        with_missing_secrets: add the secrets that the stack needs and that are not set yet.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a stack file.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_StackFileLoader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    config = raw.get("config") if isinstance(raw, dict) else None
    if not config:
        raise ValueError(f"{path} is not a stack file: it has no section `config`")
    prefix = f"{PROJECT}:"
    values = {str(key).removeprefix(prefix): value for key, value in config.items() if str(key).startswith(prefix)}
    secret_keys = {key for key, value in values.items() if isinstance(value, Mapping) and set(value) == {"secure"}}
    if with_missing_secrets:
        layer = layer_of(values)
        expected = {name for name, secret in SECRET_KEYS.items() if secret.needed == "always"}
        store, images, database = values.get("object_store"), values.get("images"), values.get("database")
        kind = database.get("kind") if isinstance(database, Mapping) else None
        if kind != "aws":
            expected.add("database_owner_password")
        if kind not in ("aws", "external") or (isinstance(database, Mapping) and database.get("service_role")):
            expected.add("database_service_password")
        if not isinstance(store, Mapping) or store.get("kind") != "aws":
            expected.add("object_store_secret_access_key")
        if isinstance(store, Mapping) and store.get("job_access_key_id"):
            expected.add("object_store_job_secret_access_key")
        if isinstance(images, Mapping) and images.get("pull_secret"):
            expected.add("registry_password")
        if values.get("hosts"):
            expected.add("ssh_private_key")
        secret_keys |= {name for name in expected - values.keys() if is_in_layer(name, layer)}
    return StackFileText(
        stack=path.stem.removeprefix("Pulumi."),
        values={**values, **dict.fromkeys(secret_keys, SHOWN_SECRET)},
        secret_keys=frozenset(secret_keys),
    )


def read_neighbours(directory: Path, *, stack: str) -> dict[str, Mapping[str, Any]]:
    """Return the values of the other stack files of a directory by stack. Unreadable files are left out.

    Args:
        directory: the directory of ``Pulumi.yaml``.
        stack: the stack to leave out.
    """
    neighbours: dict[str, Mapping[str, Any]] = {}
    for path in sorted(directory.glob("Pulumi.*.yaml")):
        with contextlib.suppress(OSError, ValueError):
            text = read_stack_file(path, with_missing_secrets=False)
            neighbours[text.stack] = text.values
    neighbours.pop(stack, None)
    return neighbours
