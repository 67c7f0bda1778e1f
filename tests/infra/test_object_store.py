"""The kinds of object store: what they make in the cluster, who may do what in them, and how they are reached."""

import json
import os
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from infra import object_store
from infra.images import ImageReference
from infra.naming import StackNames
from infra.object_store import (
    BundledObjectStore,
    BundledObjectStoreArgs,
    ObjectStoreLogin,
    customer_object_store,
    derived_secret,
    job_policy,
)
from infra.recording import Recording, is_secret, record
from service.settings import parse_object_store_url

NAMES = StackNames(customer="acme", environment="dev")
IMAGE = ImageReference.parse("registry.example/versitygw@sha256:" + "0" * 64)
SETUP = Path(object_store.__file__).parent / "scripts/object_store_bucket.py"


def bundled(**changes: Any) -> Recording:
    wanted: dict[str, Any] = {"names": NAMES, "image": IMAGE, "service_image": IMAGE, "storage": "100Gi"}
    args = BundledObjectStoreArgs(**wanted | {"secret_access_key": "s3cret"} | changes)
    return record(lambda: BundledObjectStore("object-store", args) and None)


def setup_environment(recording: Recording) -> dict[str, str]:
    [container] = recording.of_type("Job")[0].inputs["spec"]["template"]["spec"]["containers"]
    return {variable["name"]: variable["value"] for variable in container["env"]}


def test_the_service_reads_the_url_of_either_kind() -> None:
    login = ObjectStoreLogin(access_key_id="ID", secret_access_key="s3cret")
    own = customer_object_store(
        bucket="batch", prefix="/acme/prod/", endpoint_url="https://s3.example:9000", region="eu-1", service=login
    )

    location = parse_object_store_url(own.url)

    assert (location.bucket, location.prefix, location.region) == ("batch", "acme/prod", "eu-1")
    assert location.endpoint_url == "https://s3.example:9000"
    assert own.job == own.service


def test_the_keys_stand_in_one_secret_and_nowhere_else() -> None:
    recording = bundled()

    keys = recording.named("object-store-keys")
    assert is_secret(keys, ("stringData", "secret_access_key"))
    others = str([resource.inputs for resource in recording.resources if resource is not keys])
    assert "s3cret" not in others
    assert derived_secret("s3cret", "object store key of jobs") not in others


def test_jobs_have_a_key_of_their_own_made_of_the_other_one() -> None:
    files = bundled().named("object-store-keys").inputs["stringData"]

    assert files["job_access_key_id"] != files["access_key_id"]
    assert files["job_secret_access_key"] == derived_secret("s3cret", "object store key of jobs")
    assert files["job_secret_access_key"] != derived_secret("s3cret2", "object store key of jobs")


def test_jobs_may_write_parts_and_read_files_and_nothing_else() -> None:
    statements = job_policy(bucket="batch", prefix="acme/prod", principal="jobs")["Statement"]

    writes = [s["Resource"] for s in statements if "s3:PutObject" in s["Action"]]
    assert writes == [["arn:aws:s3:::batch/acme/prod/batches/*"]]
    actions = {action for statement in statements for action in statement["Action"]}
    assert actions == {"s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"}


def test_jobs_list_no_keys_of_others_and_read_weights_where_they_are() -> None:
    listing, reading, _ = job_policy(bucket="batch", prefix="acme", principal="jobs", weights_prefix="llm")["Statement"]

    assert listing["Condition"] == {"StringLike": {"s3:prefix": ["acme/*"]}}
    assert "arn:aws:s3:::batch/acme/llm/*" in reading["Resource"]
    assert "/acme/dev/llm/*" in setup_environment(bundled(weights_prefix="llm"))["POLICY"]


def test_a_changed_policy_is_another_job_because_a_job_cannot_change() -> None:
    before, after = bundled(), bundled(names=StackNames(customer="acme", environment="test"))

    names = [recording.of_type("Job")[0].inputs["metadata"]["name"] for recording in (before, bundled(), after)]

    assert names[0] == names[1] != names[2]


def test_a_new_key_makes_a_new_pod() -> None:
    def annotations(recording: Recording) -> Any:
        return recording.of_type("StatefulSet")[0].inputs["spec"]["template"]["metadata"]["annotations"]

    assert annotations(bundled()) == annotations(bundled())
    assert annotations(bundled()) != annotations(bundled(secret_access_key="another"))


def test_the_volume_is_protected_and_stays_unless_the_stack_may_lose_its_data() -> None:
    kept, lost = bundled().named("object-store-data"), bundled(keep_data=False).named("object-store-data")

    assert (kept.protect, kept.retain_on_delete) == (True, True)
    assert (lost.protect, lost.retain_on_delete) == (False, False)


@pytest.fixture
def gateway(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``versitygw`` tells with what it was started."""
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


def test_the_start_script_gives_the_gateway_both_keys_and_neither_as_an_argument(gateway: dict[str, str]) -> None:
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
def test_the_setup_makes_the_bucket_and_its_policy_and_can_be_run_again(
    endpoint_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
