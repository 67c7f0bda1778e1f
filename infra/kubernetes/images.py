"""Container images of a stack: referenced by digest, pulled from a mirror if there is one, with a pull secret."""

import re
from dataclasses import dataclass
from typing import Final, Self

import pulumi
from pulumi_kubernetes import core, meta

from infra.kubernetes.naming import StackNames

PULL_SECRET: Final = "image-pull"  # noqa: S105 - a name
"""Name of the pull secret in each namespace of a stack."""

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_HOST: Final = re.compile(r"localhost|[a-z0-9]([-.a-z0-9]*[a-z0-9])?", re.IGNORECASE)
# https://github.com/opencontainers/distribution-spec/blob/main/spec.md#pulling-manifests
_NAME: Final = re.compile(r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*")


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image by its digest: ``registry.example/cloister/service@sha256:…``.

    A tag can move to other content; a digest identifies the content. So a reference has no tag.

    Attributes:
        registry: host, with a port if it is not 443.
        name: path within the registry.
        digest: ``sha256:`` and 64 hexadecimal digits.
    """

    registry: str
    name: str
    digest: str

    @classmethod
    def parse(cls, text: object) -> Self:
        """Parse ``registry/name@sha256:digest``.

        Raises:
            ValueError: it is no text or has another form; the message describes the problem and the right form.
        """
        if not isinstance(text, str):
            raise ValueError("must be text: name@sha256:digest")  # noqa: TRY004 - pydantic collects no TypeError
        repository, at, digest = text.partition("@")
        if not at:
            raise ValueError(f"{text!r} has no digest: write registry/name@sha256:…, which the push of an image prints")
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} is not a digest: it must be sha256: and 64 hexadecimal digits in lower case")
        registry, _, name = repository.partition("/")
        if not _is_registry(registry) or not name:
            raise ValueError(f"{repository!r} names no registry: write its host first, as in registry.example/{name}")
        if ":" in name:
            raise ValueError(f"{text!r} has a tag beside the digest: leave the tag out")
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not an image name: use lower case letters, digits and . _ - / between them")
        return cls(registry=registry, name=name, digest=digest)

    def mirrored(self, mirror: str) -> "ImageReference":
        """Return the same image in a mirror, which keeps the names of all registries below one path.

        Args:
            mirror: ``host[:port][/path]``; empty for no mirror.

        Raises:
            ValueError: ``mirror`` has another form.
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
    """Return whether the first segment of a name is a host: it has a dot or a port, or is localhost.

    Container runtimes apply the same rule.
    """
    host, _, port = text.partition(":")
    is_host = bool(_HOST.fullmatch(host)) and (not port or port.isdecimal())
    return is_host and ("." in host or bool(port) or host == "localhost")


class PullSecrets(pulumi.ComponentResource):
    """The pull secrets of the service's and of the jobs' namespace.

    Args:
        name: logical name of the component.
        names: names of the stack.
        docker_config: content of the secrets; the account needs the right to pull only.
        opts: options of the component.
    """

    secrets: tuple[core.v1.Secret, ...]

    def __init__(
        self,
        name: str,
        *,
        names: StackNames,
        docker_config: pulumi.Input[str],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("cloister:images:PullSecrets", name, None, opts)
        self.secrets = tuple(
            core.v1.Secret(
                f"{namespace}-{PULL_SECRET}",
                metadata=meta.v1.ObjectMetaArgs(name=PULL_SECRET, namespace=namespace, labels=names.labels("images")),
                type="kubernetes.io/dockerconfigjson",
                string_data={".dockerconfigjson": pulumi.Output.secret(docker_config)},
                opts=pulumi.ResourceOptions(parent=self),
            )
            for namespace in (names.service_namespace, names.jobs_namespace)
        )
        self.register_outputs({})
