"""Private certificate authorities in the pods of a stack."""

import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from infra.policy import refusals
from infra.rendering.recording import Recording
from tests.infra.previewed_stacks import preview, preview_values, stack_text
from tests.security.tls_servers import make_authority


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_authority(tmp_path_factory.mktemp("tls") / "authority").ca_file.read_text()


def previewed(name: str, pem: str, **sections: Any) -> Recording:
    text = stack_text(name)
    return preview_values({**text.values, **sections, "trust": {"ca_bundle": pem}}, text.secret_keys)


def job_pods(recording: Recording) -> Iterator[dict[str, Any]]:
    [templates] = [each for each in recording.of_type("ConfigMap") if each.name == "ray-job-templates"]
    for text in templates.inputs["data"].values():
        cluster = json.loads(text)["spec"]["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            yield group["template"]["spec"]


@pytest.mark.parametrize("name", ["dev", "air-gap", "own-postgres-and-s3"])
def test_every_pod_of_service_and_jobs_trusts_the_bundle(name: str, pem: str) -> None:
    recording = previewed(name, pem)
    maps = [each for each in recording.of_type("ConfigMap") if each.inputs["metadata"]["name"] == "ca-bundle"]
    assert len({each.inputs["metadata"]["namespace"] for each in maps}) == 2
    assert all(each.inputs["data"] == {"ca.crt": pem} for each in maps)
    pods = [each.inputs["spec"]["template"]["spec"] for each in recording.of_type("Deployment")]
    for spec in (*(pod for pod in pods if pod.get("initContainers")), *job_pods(recording)):
        assert "ca-bundle" in [volume["name"] for volume in spec["volumes"]]
        for container in spec["containers"]:
            variables = {each["name"]: each["value"] for each in container["env"]}
            assert variables["SSL_CERT_FILE"].endswith(".crt")
    weights = [init for spec in job_pods(recording) for init in spec["initContainers"]]
    assert all("SSL_CERT_FILE" in {each["name"] for each in init["env"]} for init in weights)
    assert refusals(recording, today=date(2030, 1, 1)) == ()


def test_stack_without_a_bundle_keeps_the_authorities_of_its_images() -> None:
    recording = preview()
    assert "SSL_CERT_FILE" not in str([each.inputs for each in recording.resources])


def test_another_bundle_rolls_the_pods(pem: str, tmp_path: Path) -> None:
    def annotations(bundle: str) -> dict[str, str]:
        [api] = [each for each in previewed("dev", bundle).of_type("Deployment") if each.name == "api"]
        found: dict[str, str] = api.inputs["spec"]["template"]["metadata"]["annotations"]
        return found

    assert annotations(pem) != annotations(make_authority(tmp_path / "other").ca_file.read_text())


def test_backups_trust_public_and_private_authorities(pem: str) -> None:
    recording = previewed("air-gap", pem)
    [store] = [each for each in recording.resources if each.inputs.get("kind") == "ObjectStore"]
    reference = store.inputs["spec"]["configuration"]["endpointCA"]
    [secret] = [each for each in recording.of_type("Secret") if each.inputs["metadata"]["name"] == reference["name"]]
    bundle = secret.inputs["stringData"][reference["key"]]
    assert bundle.endswith(pem)
    assert bundle.count("BEGIN CERTIFICATE") > 100


def test_external_database_without_its_own_certificate_uses_the_bundle(pem: str) -> None:
    database = {**stack_text("own-postgres-and-s3").values["database"], "ca_certificate": None}
    recording = previewed("own-postgres-and-s3", pem, database=database)
    [ca] = [each for each in recording.of_type("ConfigMap") if each.inputs["metadata"]["name"] == "database-ca"]
    assert ca.inputs["data"] == {"ca.crt": pem}
