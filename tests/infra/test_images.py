"""References to images, mirrors and pull secrets."""

import base64
import json

import pytest

from infra.images import ImageReference, PullSecrets, PullSecretsArgs
from infra.naming import StackNames
from infra.recording import is_secret, record

DIGEST = "sha256:" + "0123456789abcdef" * 4


def image(name: str) -> ImageReference:
    return ImageReference.parse(f"{name}@{DIGEST}")


@pytest.mark.parametrize(
    "repository", ["registry.example/cloister/service", "localhost/a", "host:5000/a/b", "registry.example/a__b/c-d.e"]
)
def test_a_reference_by_digest_is_read_and_written_unchanged(repository: str) -> None:
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
        (f"registry.example/Service@{DIGEST}", "not a name of an image"),
        (f"registry.example/@{DIGEST}", "names no registry"),
        (f"https://registry.example/service@{DIGEST}", "names no registry"),
    ],
)
def test_anything_else_is_refused_with_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageReference.parse(text)


def test_a_mirror_takes_the_place_of_the_registry_and_the_digest_stays() -> None:
    mirrored = image("registry.example/library/postgres").mirrored("mirror.example:5000/cloister")

    assert str(mirrored) == f"mirror.example:5000/cloister/library/postgres@{DIGEST}"


def test_an_image_that_is_in_the_mirror_already_stays_as_it_is() -> None:
    there = image("mirror.example/cloister/service")

    assert there.mirrored("mirror.example/cloister") == there
    assert there.mirrored("mirror.example") == there
    assert there.mirrored("") == there


@pytest.mark.parametrize("mirror", ["https://mirror.example", "mirror", "mirror.example/Path", "mirror.example:x"])
def test_what_is_no_mirror_is_refused(mirror: str) -> None:
    with pytest.raises(ValueError, match="is not a mirror"):
        image("registry.example/a").mirrored(mirror)


def test_the_pull_secret_stands_in_both_namespaces_and_is_a_secret() -> None:
    names = StackNames(customer="acme", environment="dev")
    args = PullSecretsArgs(names=names, registry="mirror.example", username="puller", password="s3cret")

    recording = record(lambda: PullSecrets("images", args) and None)

    secrets = recording.of_type("Secret")
    assert {s.inputs["metadata"]["namespace"] for s in secrets} == {"cloister-acme-dev", "cloister-acme-dev-jobs"}
    for secret in secrets:
        assert is_secret(secret, ("stringData", ".dockerconfigjson"))
        login = json.loads(secret.inputs["stringData"][".dockerconfigjson"])["auths"]["mirror.example"]
        assert base64.b64decode(login["auth"]) == b"puller:s3cret"
