"""References to images, mirrors and pull secrets."""

import base64
import json

import pytest

from infra.kubernetes.images import ImageReference
from infra.kubernetes.naming import StackNames
from infra.stack_file.secret_keys import SHOWN_SECRET
from tests.infra.previewed_stacks import preview, stack_text

DIGEST = "sha256:" + "0123456789abcdef" * 4


def image(name: str) -> ImageReference:
    return ImageReference.parse(f"{name}@{DIGEST}")


@pytest.mark.parametrize(
    "repository", ["registry.example/cloister/service", "localhost/a", "host:5000/a/b", "registry.example/a__b/c-d.e"]
)
def test_reference_by_digest_is_read_and_written_unchanged(repository: str) -> None:
    assert str(image(repository)) == f"{repository}@{DIGEST}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("registry.example/service:1.2", "has no digest"),
        ("registry.example/service", "has no digest"),
        ("registry.example/service@sha256:12", "64 hexadecimal digits"),
        (f"registry.example/service@{DIGEST.upper()}", "not a digest"),
        (f"registry.example/service@sha512:{'0' * 64}", "not a digest"),
        (f"service@{DIGEST}", "names no registry"),
        (f"library/service@{DIGEST}", "names no registry"),
        (f"registry.example/service:1.2@{DIGEST}", "leave the tag out"),
        (f"registry.example/Service@{DIGEST}", "is not an image name"),
        (f"registry.example/@{DIGEST}", "names no registry"),
        (f"https://registry.example/service@{DIGEST}", "names no registry"),
    ],
)
def test_other_reference_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageReference.parse(text)


def test_mirror_replaces_the_registry_and_keeps_the_digest() -> None:
    mirrored = image("registry.example/library/postgres").mirrored("mirror.example:5000/cloister")

    assert str(mirrored) == f"mirror.example:5000/cloister/library/postgres@{DIGEST}"


def test_image_in_the_mirror_is_unchanged() -> None:
    there = image("mirror.example/cloister/service")

    assert there.mirrored("mirror.example/cloister") == there
    assert there.mirrored("mirror.example") == there
    assert there.mirrored("") == there


@pytest.mark.parametrize("mirror", ["https://mirror.example", "mirror", "mirror.example/Path", "mirror.example:x"])
def test_invalid_mirror_is_refused(mirror: str) -> None:
    with pytest.raises(ValueError, match="is not a mirror"):
        image("registry.example/a").mirrored(mirror)


def test_pull_secret_is_in_every_namespace_and_secret() -> None:
    values = stack_text("air-gap").values
    names = StackNames(customer=values["customer"], environment=values["environment"])
    account = values["images"]["pull_secret"]

    secrets = [secret for secret in preview("air-gap").of_type("Secret") if secret.name.endswith("image-pull")]

    own = {names.service_namespace, names.jobs_namespace}
    platform = {"kuberay-system", "cloister-device-plugin"}
    assert {secret.inputs["metadata"]["namespace"] for secret in secrets} == own | platform
    for secret in secrets:
        assert secret.is_secret(("stringData", ".dockerconfigjson"))
        login = json.loads(secret.inputs["stringData"][".dockerconfigjson"])["auths"][account["registry"]]
        assert base64.b64decode(login["auth"]).decode() == f"{account['username']}:{SHOWN_SECRET}"
