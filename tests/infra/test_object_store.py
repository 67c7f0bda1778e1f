"""Kinds of object store: their resources, policies and connections."""

import json
import os
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pulumi_kubernetes as kubernetes
import pytest
from moto.server import ThreadedMotoServer

from infra.data import object_store
from infra.data.object_store import (
    BundledObjectStore,
    BundledObjectStoreArgs,
    derived_secret,
    job_policy,
)
from infra.kubernetes.images import ImageReference
from infra.kubernetes.kept_data import DataProtection
from infra.kubernetes.naming import StackNames
from infra.rendering.recording import Recording, record
from service.settings import parse_object_store_url
from tests.infra.previewed_stacks import changed, preview_values, stack_text

NAMES = StackNames(customer="acme", environment="dev")
IMAGE = ImageReference.parse("registry.example/versitygw@sha256:" + "0" * 64)
SETUP = Path(object_store.__file__).parent / "scripts/object_store_bucket.py"


def bundled(*, keep_data: bool = True, **changes: Any) -> Recording:
    def program() -> None:
        provider = kubernetes.Provider("kept-data", upsert_existing_objects=True)
        wanted: dict[str, Any] = {"names": NAMES, "image": IMAGE, "service_image": IMAGE, "storage": "100Gi"}
        wanted |= {"protection": DataProtection(provider=provider, keep_data=keep_data)}
        args = BundledObjectStoreArgs(**wanted | {"secret_access_key": "s3cret", "digest_key": "key"} | changes)
        BundledObjectStore("object-store", args)

    return record(program)


def own_s3(**changes: Any) -> Recording:
    """Record the example with the customer's own S3, with other keys in the section of the object store."""
    name = "own-postgres-and-s3"
    values, secret_keys = changed(name), stack_text(name).secret_keys
    values["object_store"] = {**values["object_store"], **changes}
    if changes.get("job_access_key_id", "own") is None:
        values.pop("object_store_job_secret_access_key")
    return preview_values(values, secret_keys & values.keys())


def setup_environment(recording: Recording) -> dict[str, str]:
    [container] = recording.of_type("Job")[0].inputs["spec"]["template"]["spec"]["containers"]
    return {variable["name"]: variable["value"] for variable in container["env"]}


def test_service_parses_the_object_store_url() -> None:
    (api,) = [each for each in own_s3(prefix="/acme/prod/").of_type("Deployment") if each.name == "api"]
    [container] = api.inputs["spec"]["template"]["spec"]["containers"]
    [url] = [variable["value"] for variable in container["env"] if variable["name"] == "CLOISTER_OBJECT_STORE"]

    location = parse_object_store_url(url)

    assert (location.bucket, location.prefix, location.region) == ("initech-llm-batch", "acme/prod", "eu-central-1")
    assert location.endpoint_url == "https://s3.initech.example"


def test_weights_are_copied_with_the_key_of_the_service_unless_there_is_another() -> None:
    def keys(recording: Recording) -> list[str]:
        secrets = [each.inputs["stringData"] for each in recording.of_type("Secret")]
        return [content["aws"] for content in secrets if content.keys() == {"aws"}]

    assert len(set(keys(own_s3(job_access_key_id=None)))) == 1
    assert len(set(keys(own_s3()))) == 2


def test_keys_are_in_one_secret_only() -> None:
    recording = bundled()

    keys = recording.named("object-store-keys")
    assert keys.is_secret(("stringData", "secret_access_key"))
    others = str([resource.inputs for resource in recording.resources if resource is not keys])
    assert "s3cret" not in others
    assert derived_secret("s3cret", "object store key of jobs") not in others


def test_key_of_jobs_is_derived_from_the_key_of_the_service() -> None:
    files = bundled().named("object-store-keys").inputs["stringData"]

    assert files["job_access_key_id"] != files["access_key_id"]
    assert files["job_secret_access_key"] == derived_secret("s3cret", "object store key of jobs")
    assert files["job_secret_access_key"] != derived_secret("s3cret2", "object store key of jobs")


@pytest.mark.parametrize(("prefix", "weights"), [("acme", "acme/llm/*"), ("", "llm/*")])
def test_key_of_jobs_lists_and_reads_weights_only(prefix: str, weights: str) -> None:
    policy = job_policy(bucket="batch", prefix=prefix, principal="jobs", weights_prefix="llm")
    listing, reading = policy["Statement"]

    assert (listing["Action"], listing["Condition"]) == (
        ["s3:ListBucket"],
        {"StringLike": {"s3:prefix": [weights]}},
    )
    assert (reading["Action"], reading["Resource"]) == (["s3:GetObject"], [f"arn:aws:s3:::batch/{weights}"])


def test_policy_of_the_bundled_store_has_the_prefix_of_the_weights() -> None:
    assert "/acme/dev/llm/*" in setup_environment(bundled(weights_prefix="llm"))["POLICY"]


def test_changed_policy_creates_another_setup_job() -> None:
    before, after = bundled(), bundled(names=StackNames(customer="acme", environment="test"))

    names = [recording.of_type("Job")[0].inputs["metadata"]["name"] for recording in (before, bundled(), after)]

    assert names[0] == names[1] != names[2]


def test_new_key_replaces_the_pod() -> None:
    def annotations(recording: Recording) -> Any:
        return recording.of_type("StatefulSet")[0].inputs["spec"]["template"]["metadata"]["annotations"]

    assert annotations(bundled()) == annotations(bundled())
    assert annotations(bundled()) != annotations(bundled(secret_access_key="another"))


def test_volume_is_protected_if_the_stack_keeps_its_data() -> None:
    kept, unprotected = bundled().named("object-store-data"), bundled(keep_data=False).named("object-store-data")

    assert (kept.protect, unprotected.protect) == (True, False)
    assert "::kept-data::" in kept.provider


@pytest.fixture
def gateway(tmp_path: Path) -> dict[str, str]:
    """Environment in which ``versitygw`` prints its keys and arguments."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/versitygw"
    program.write_text('#!/bin/sh\necho "$ROOT_ACCESS_KEY_ID $ROOT_SECRET_ACCESS_KEY"\necho "$@"\n')
    program.chmod(0o755)
    for name in ("keys", "accounts", "volume"):
        (tmp_path / name).mkdir()
    for name, value in bundled().named("object-store-keys").inputs["stringData"].items():
        (tmp_path / "keys" / name).write_text(value)
    directories = {"KEYS": "keys", "ACCOUNTS": "accounts", "VOLUME": "volume"}
    environment = {name: str(tmp_path / directory) for name, directory in directories.items()}
    return environment | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "REGION": "us-east-1"}


def test_start_script_passes_both_keys_but_not_as_arguments(gateway: dict[str, str]) -> None:
    command = ["/bin/sh", str(SETUP.parent / "versitygw_start.sh"), "--port", ":7070"]

    done = subprocess.run(command, env=gateway, capture_output=True, text=True, check=True)

    keys, arguments = done.stdout.splitlines()
    assert keys == "cloister-acme-dev s3cret"
    assert "--port :7070 posix --sidecar" in arguments
    assert "s3cret" not in arguments
    accounts = json.loads((Path(gateway["ACCOUNTS"]) / "users.json").read_text())["accessAccounts"]
    job = accounts["cloister-acme-dev-jobs"]
    assert (job["secret"], job["role"]) == (derived_secret("s3cret", "object store key of jobs"), "user")


@pytest.fixture
def endpoint_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.mark.local_network
def test_setup_creates_bucket_and_policy_and_is_repeatable(endpoint_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = setup_environment(bundled()) | {"ENDPOINT_URL": endpoint_url}
    monkeypatch.delenv("AWS_SHARED_CREDENTIALS_FILE", raising=False)
    for name in ("ENDPOINT_URL", "REGION", "BUCKET", "POLICY"):
        monkeypatch.setenv(name, environment[name])

    for _ in range(2):
        runpy.run_path(str(SETUP), run_name="__main__")

    client = boto3.client("s3", endpoint_url=endpoint_url, region_name="us-east-1")
    policy = client.get_bucket_policy(Bucket=os.environ["BUCKET"])["Policy"]
    client.close()
    assert json.loads(policy) == json.loads(environment["POLICY"])
