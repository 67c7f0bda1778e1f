"""Keys of a stack file that are Pulumi secrets, and what can be wrong with them."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from infra.stack_file.sections import PROJECT, BundledObjectStoreSection, ExternalDatabaseSection, S3ObjectStoreSection
from service.model_catalogue import ModelEntry

if TYPE_CHECKING:
    from infra.stack_file.cluster_sections import ImagesSection, KubernetesSection

SHOWN_SECRET: Final = "shown-in-place-of-a-secret"  # noqa: S105 - a placeholder
"""Replaces the value of a secret where the stack file is read without Pulumi."""
_UNLESS_AWS: Final = {"database_owner_password": "database", "object_store_secret_access_key": "object_store"}
"""Secrets that a stack needs, unless the kind of a section is ``aws``."""
_MULTILINE: Final = frozenset({"kubeconfig", "ssh_private_key"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretKey:
    """A key that Pulumi encrypts in the stack file and in the state.

    Attributes:
        name: the key, without the project.
        meaning: what it holds.
        needed: when it is required.
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


_KEYS: Final = (
    SecretKey(
        name="database_owner_password",
        meaning="password of the role that owns the database, for migrations",
        needed="unless `database.kind` is `aws`",
    ),
    SecretKey(
        name="database_service_password",
        meaning="password of the database role that the service logs in with",
        needed="unless `database.kind` is `aws`, or `external` without `service_role`",
    ),
    SecretKey(
        name="object_store_secret_access_key",
        meaning="secret half of the object store's key; the bundled store is created with it",
        needed="unless `object_store.kind` is `aws`",
    ),
    SecretKey(
        name="encryption_keys",
        meaning="keys that encrypt webhook secrets in the database, separated by commas: the first encrypts, all "
        "decrypt",
        needed="always",
        example="$(openssl rand -base64 32)",
    ),
    SecretKey(
        name="receipt_key",
        meaning="private key that signs deletion receipts, 64 hexadecimal digits; keep it as long as the stack",
        needed="always",
        example="$(openssl rand -hex 32)",
    ),
    SecretKey(
        name="object_store_job_secret_access_key",
        meaning="secret half of the key that copies weights",
        needed="with `object_store.job_access_key_id`",
    ),
    SecretKey(
        name="registry_password",
        meaning="password of `images.pull_secret.username`",
        needed="with `images.pull_secret`",
        example="$(cat registry-password)",
    ),
    SecretKey(
        name="http_engine_api_key",
        meaning="API key of the endpoints of models in the http engine",
        needed="if those endpoints require a key",
        example="$(cat endpoint-key)",
    ),
    SecretKey(
        name="kubeconfig",
        meaning="the kubeconfig itself, if its file is not on the machine that runs `pulumi up`",
        needed="never; replaces `kubernetes.kubeconfig`",
        example="$(cat kubeconfig)",
    ),
    SecretKey(
        name="ssh_private_key",
        meaning="private key, without a passphrase, of the user who logs in on the hosts",
        needed="with `hosts`",
        example="$(cat id_ed25519)",
    ),
)
SECRET_KEYS: Final[Mapping[str, SecretKey]] = {secret.name: secret for secret in _KEYS}


def secret_problems(
    secrets: Mapping[str, str],
    *,
    encrypted: Collection[str],
    known: Collection[str],
    sections: Mapping[str, Any],
    models: Mapping[int, ModelEntry] | None,
) -> Iterator[str]:
    """Yield what is wrong with the secrets, as ``key: what is wrong; what to do``. No message repeats a value.

    Args:
        secrets: the values of secret keys.
        encrypted: the keys that Pulumi keeps as secrets.
        known: the secret keys of the stack's layer.
        sections: the valid sections by key.
        models: the models by index; None if one of them is wrong.
    """
    for name, value in secrets.items():
        command = SECRET_KEYS[name].command
        if name not in encrypted:
            yield f"{name}: is in the stack file in plain text; create a new one and set it with `{command}`"
        elif not value.strip():
            yield f"{name}: is empty; set it with `{command}`"
        if name not in _MULTILINE and not value.isprintable():
            yield f"{name}: has a line break or another control character; set it with `{command}`"
    # A section that is wrong does not say that a secret is not needed.
    always = {name for name, section in _UNLESS_AWS.items() if not sections.get(section)}
    always |= {secret.name for secret in SECRET_KEYS.values() if secret.needed == "always"}
    for secret in SECRET_KEYS.values():
        if secret.name in always and secret.name in known and secret.name not in secrets:
            yield f"{secret.name}: is required: {secret.meaning}; set it with `{secret.command}`"
    store = sections.get("object_store")
    for name, owner, needed in _owners(sections):
        if needed and name not in secrets:
            yield f"{name}: is required because of {owner}; set it with `{SECRET_KEYS[name].command}`"
        if not needed and name in secrets:
            yield f"{name}: belongs to {owner}, which is missing; add it or remove the secret"
    key = secrets.get("object_store_secret_access_key", "")
    if isinstance(store, BundledObjectStoreSection) and not re.fullmatch(r"[A-Za-z0-9-]*", key.strip()):
        command = SECRET_KEYS["object_store_secret_access_key"].command
        yield (
            "object_store_secret_access_key: the bundled object store accepts letters, digits and hyphens only; set it "
            f"with `{command}`"
        )
    keys = secrets.get("encryption_keys", SHOWN_SECRET).replace(",", " ").split()
    is_valid = keys and all(re.fullmatch(r"[A-Za-z0-9+/_-]{43}=", key) for key in keys)
    if keys != [SHOWN_SECRET] and not is_valid:
        command = SECRET_KEYS["encryption_keys"].command
        yield f"encryption_keys: each key must be 32 bytes in base64; set a new stack's first key with `{command}`"
    receipt_key = secrets.get("receipt_key", SHOWN_SECRET).strip()
    if receipt_key != SHOWN_SECRET and not re.fullmatch(r"[0-9a-fA-F]{64}", receipt_key):
        command = SECRET_KEYS["receipt_key"].command
        yield f"receipt_key: must be 64 hexadecimal digits; set it with `{command}`"
    if "kubeconfig" in secrets:
        yield from _kubeconfig_problems(sections)
    uses_http = models is None or any(model.engine == "http" for model in models.values())
    if "http_engine_api_key" in secrets and not uses_http:
        yield "http_engine_api_key: no model is in the http engine; remove the secret or add the model"


def _kubeconfig_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    """Yield what contradicts the secret ``kubeconfig``."""
    kubernetes: KubernetesSection | None = sections.get("kubernetes")
    if kubernetes and kubernetes.kubeconfig:
        yield "kubernetes.kubeconfig: the secret kubeconfig is set too; keep one of the two"
    for name in ("hosts", "aws"):
        if sections.get(name):
            yield f"kubeconfig: the cluster is made by {name}, which has the kubeconfig; remove the secret"


def _owners(sections: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Yield each secret that a part of the file needs, that part, and whether the file has it."""
    images: ImagesSection | None = sections.get("images")
    store, database = sections.get("object_store"), sections.get("database")
    if images:
        yield "registry_password", "images.pull_secret", images.pull_secret is not None
    if store:
        with_keys = "an object_store.kind other than aws" if store.kind == "aws" else f"object_store.kind: {store.kind}"
        yield "object_store_secret_access_key", with_keys, store.kind != "aws"
        has_job_key = isinstance(store, S3ObjectStoreSection) and store.job_access_key_id is not None
        yield "object_store_job_secret_access_key", "object_store.job_access_key_id", has_job_key
    if database:
        is_external = isinstance(database, ExternalDatabaseSection)
        kind = "a database.kind other than aws" if database.kind == "aws" else f"database.kind: {database.kind}"
        yield "database_owner_password", kind, database.kind != "aws"
        owner = "database.service_role" if is_external else kind
        is_needed = database.service_role is not None if is_external else database.kind != "aws"
        yield "database_service_password", owner, is_needed
    if "hosts" in sections:
        yield "ssh_private_key", "hosts", sections["hosts"] is not None
