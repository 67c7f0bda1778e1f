"""The stack file as a whole: its sections, its secrets, and how to find a section by a path of keys."""

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

from infra.config_sections import (
    Api,
    BundledDatabase,
    BundledObjectStore,
    Database,
    DevicePlugin,
    Images,
    Jobs,
    KubeRay,
    Kubernetes,
    Limits,
    ModelWeights,
    Network,
    NodePools,
    NoWeights,
    ObjectStore,
    Section,
    key,
)
from infra.config_values import Count, Customer, Environment

PROJECT: Final = "cloister"
"""The Pulumi project: the namespace of the keys in a stack file."""


class StackFile(Section):
    """All keys of a stack file but the secrets."""

    customer: Customer = key("whose stack it is", "acme")
    environment: Environment = key("which of the customer's stacks", "prod")
    kubernetes: Kubernetes = key("see below", {})
    network: Network = key("see below", {})
    images: Images = key("see below", {})
    node_pools: NodePools = key("see below", {})
    device_plugin: DevicePlugin = key("see below", {}, default=DevicePlugin())
    kuberay: KubeRay = key("see below", {}, default=KubeRay())
    database: Database = key("see below", {}, default=BundledDatabase(kind="bundled"))
    object_store: ObjectStore = key("see below", {}, default=BundledObjectStore(kind="bundled"))
    models: Annotated[list[dict[str, Any]], Field(min_length=1)] = key(
        "the models, with the keys of `models.yaml` (README, Models)", [{"id": "llama-3.1-8b", "accelerator": "a10g"}]
    )
    model_weights: ModelWeights = key("see below", {}, default=NoWeights(kind="image"))
    api: Api = key("see below", {}, default=Api())
    jobs: Jobs = key("see below", {}, default=Jobs())
    limits: Limits = key("see below", {}, default=Limits())
    keep_data: bool = key(
        "volumes, and what they need to be read again, are protected, and stay when the stack is destroyed",
        False,
        default=True,
    )
    retention_days: Annotated[int, Field(ge=1, le=3650)] = key(
        "how long files without an expiry of their own, and batches that have ended, are kept",
        90,
        default=30,
        unit="days",
    )
    workspace_gib: Count = key(
        "disk of each pod of API and reconciler, for uploads and for the results of batches while they are assembled",
        20,
        default=5,
        unit="GiB",
    )
    log_level: Literal["debug", "info", "warning", "error"] = key(
        "the least important lines that API and reconciler log", "warning", default="info"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretKey:
    """A key that is a Pulumi secret: encrypted in the stack file and in the state.

    Attributes:
        name: the key, without the project.
        meaning: what it is.
        needed: when it must be there.
        example: a command that prints a value, or a file that holds one.
    """

    name: str
    meaning: str
    needed: str
    example: str = "$(openssl rand -hex 24)"

    @property
    def command(self) -> str:
        """The command that sets it."""
        return f'pulumi config set --secret {PROJECT}:{self.name} "{self.example}"'


SECRET_KEYS: Final[Mapping[str, SecretKey]] = {
    secret.name: secret
    for secret in (
        SecretKey(
            name="database_owner_password",
            meaning="the password of the database role that the service uses",
            needed="always",
        ),
        SecretKey(name="database_job_password", meaning="the password of the database role of jobs", needed="always"),
        SecretKey(
            name="object_store_secret_access_key",
            meaning="the secret half of the object store's key; the bundled one takes it as its own",
            needed="always",
        ),
        SecretKey(
            name="object_store_job_secret_access_key",
            meaning="the secret half of the key of jobs",
            needed="with `object_store.job_access_key_id`",
        ),
        SecretKey(
            name="registry_password",
            meaning="the password of `images.pull_secret.username`",
            needed="with `images.pull_secret`",
            example="$(cat registry-password)",
        ),
        SecretKey(
            name="http_lane_api_key",
            meaning="the key of the endpoints of models in the http lane",
            needed="where they ask for one",
            example="$(cat endpoint-key)",
        ),
        SecretKey(
            name="kubeconfig",
            meaning="the kubeconfig itself, where its file is not on the machine that runs `pulumi up`",
            needed="never; instead of `kubernetes.kubeconfig`",
            example="$(cat kubeconfig)",
        ),
    )
}


def sections_of(annotation: Any) -> list[type[Section]]:
    """The sections that a key's type allows; empty for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return [section for part in get_args(annotation) for section in sections_of(part)]
    return []


def section_for(sections: list[type[Section]], value: Any) -> type[Section] | None:
    """Which of the sections a value is meant to be: the only one, or the one of its ``kind``."""
    if len(sections) == 1:
        return sections[0]
    kind = value.get("kind") if isinstance(value, Mapping) else None
    return next((section for section in sections if kind in kinds(section)), None)


def kinds(section: type[Section]) -> tuple[Any, ...]:
    """The values of ``kind`` that mean this section."""
    field = section.model_fields.get("kind")
    return get_args(field.annotation) if field else ()


def unit_of(field: FieldInfo) -> str:
    """The unit of a key's value in brackets, with a space before; empty for none."""
    extra = field.json_schema_extra
    unit = extra.get("unit") if isinstance(extra, dict) else ""
    return f" ({unit})" if unit else ""
