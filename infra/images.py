"""The images of a stack: by digest only, from a mirror where there is one, with the secret to pull them."""

import base64
import json
import re
from dataclasses import dataclass
from typing import Final, Self

import pulumi
from pulumi_kubernetes import core, meta

from infra.naming import StackNames

PULL_SECRET: Final = "image-pull"  # noqa: S105 - a name
"""The name of the pull secret in each namespace of a stack."""

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_HOST: Final = re.compile(r"localhost|[a-z0-9]([-.a-z0-9]*[a-z0-9])?", re.IGNORECASE)
# https://github.com/opencontainers/distribution-spec/blob/main/spec.md#pulling-manifests
_NAME: Final = re.compile(r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*")


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image by its digest: ``registry.example/cloister/service@sha256:…``.

    A tag can be moved to other content; a digest is the content. So there is no way to write a tag here.

    Attributes:
        registry: host, with a port where it is not 443.
        name: path within the registry.
        digest: ``sha256:`` and 64 hexadecimal digits.
    """

    registry: str
    name: str
    digest: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``registry/name@sha256:digest``.

        Raises:
            ValueError: it is anything else; the message says what is wrong and how to write it.
        """
        repository, at, digest = text.partition("@")
        if not at:
            raise ValueError(f"{text!r} has no digest: write registry/name@sha256:…, which the push of an image prints")
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} is not a digest: it must be sha256: and 64 hexadecimal digits in lower case")
        registry, _, name = repository.partition("/")
        if not _is_registry(registry) or not name:
            raise ValueError(f"{repository!r} names no registry: write its host first, as in registry.example/{name}")
        if ":" in name:
            raise ValueError(f"{text!r} has a tag beside the digest, which nothing would read: leave the tag out")
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name of an image: lower case letters, digits and . _ - / between them")
        return cls(registry=registry, name=name, digest=digest)

    def mirrored(self, mirror: str) -> "ImageReference":
        """The same image in a mirror, which keeps the names of all registries below one path.

        Args:
            mirror: ``host[:port][/path]``; empty for none.

        Raises:
            ValueError: it is no such thing.
        """
        if not mirror:
            return self
        registry, _, path = mirror.strip("/").partition("/")
        if "://" in mirror or not _is_registry(registry) or (path and not _NAME.fullmatch(path)):
            raise ValueError(f"{mirror!r} is not a mirror: write host[:port][/path], as in mirror.example:5000/ai")
        if self.registry == registry and self.name.startswith(f"{path}/" if path else ""):
            return self
        return ImageReference(registry=registry, name=f"{path}/{self.name}" if path else self.name, digest=self.digest)

    def __str__(self) -> str:
        return f"{self.registry}/{self.name}@{self.digest}"


def _is_registry(text: str) -> bool:
    """Whether the first part of a name is a host, by the rule of container runtimes: a dot, a port, or localhost."""
    host, _, port = text.partition(":")
    named = bool(_HOST.fullmatch(host)) and (not port or port.isdecimal())
    return named and ("." in host or bool(port) or host == "localhost")


def docker_config(*, registry: str, username: str, password: str) -> str:
    """The content of a ``kubernetes.io/dockerconfigjson`` Secret for one registry."""
    token = base64.b64encode(f"{username}:{password}".encode()).decode()
    return json.dumps({"auths": {registry: {"auth": token}}}, sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSecretsArgs:
    """How a stack's pods log in to the registry.

    Attributes:
        names: the stack.
        registry: the registry's host, with its port.
        username: may be clear.
        password: a password or token that can pull and nothing else.
    """

    names: StackNames
    registry: str
    username: pulumi.Input[str]
    password: pulumi.Input[str]


class PullSecrets(pulumi.ComponentResource):
    """The pull secret, in the service's and in the jobs' namespace."""

    secrets: tuple[core.v1.Secret, ...]

    def __init__(self, name: str, args: PullSecretsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:images:PullSecrets", name, None, opts)
        content = pulumi.Output.all(args.username, pulumi.Output.secret(args.password)).apply(
            lambda pair: docker_config(registry=args.registry, username=pair[0], password=pair[1])
        )
        self.secrets = tuple(
            core.v1.Secret(
                f"{namespace}-{PULL_SECRET}",
                metadata=meta.v1.ObjectMetaArgs(
                    name=PULL_SECRET, namespace=namespace, labels=args.names.labels("images")
                ),
                type="kubernetes.io/dockerconfigjson",
                string_data={".dockerconfigjson": content},
                opts=pulumi.ResourceOptions(parent=self),
            )
            for namespace in (args.names.service_namespace, args.names.jobs_namespace)
        )
        self.register_outputs({})
