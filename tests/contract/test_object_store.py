"""Contract of all object stores."""

import hashlib
import json
import urllib.parse
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

import boto3
import httpx
import pytest

from ray_job.contract.job_spec import ObjectStoreLocation
from service.adapters.open_object_store import open_object_store
from service.doctor.backends import check_object_store
from service.doctor.findings import Result
from service.errors import ObjectNotFoundError, ObjectStoreError, ObjectVersionsError
from service.ports import ObjectStore
from service.settings import read_settings
from tests.s3_server import s3_accepts

MIB = 1 << 20


def content(store: ObjectStore, key: str, start: int = 0) -> bytes:
    return b"".join(store.read(key, start=start))


def test_object_is_read_as_it_was_written(store: ObjectStore) -> None:
    stored = store.put("files/a", [b"one", b"", b"two"])
    assert content(store, "files/a") == b"onetwo"
    assert stored.size_bytes == 6
    assert stored.sha256 == hashlib.sha256(b"onetwo").digest()


def test_empty_object_exists(store: ObjectStore) -> None:
    assert store.put("files/a", []).size_bytes == 0
    assert content(store, "files/a") == b""


def test_large_object_is_read_in_chunks_of_at_most_one_mib(store: ObjectStore) -> None:
    chunks = [bytes([number]) * (3 * MIB + 1) for number in range(12)]
    stored = store.put("files/large", iter(chunks))
    assert stored.size_bytes == 12 * (3 * MIB + 1)
    read = list(store.read("files/large"))
    assert max(map(len, read)) <= MIB
    assert hashlib.sha256(b"".join(read)).digest() == stored.sha256


@pytest.mark.parametrize(("start", "rest"), [(0, b"0123"), (3, b"3"), (4, b""), (9, b"")])
def test_reading_can_start_at_any_byte(store: ObjectStore, start: int, rest: bytes) -> None:
    store.put("files/a", [b"0123"])
    assert content(store, "files/a", start) == rest


def test_second_put_replaces_the_object(store: ObjectStore) -> None:
    store.put("files/a", [b"old and longer"])
    store.put("files/a", [b"new"])
    assert content(store, "files/a") == b"new"


@pytest.mark.parametrize("sent", [1, 40 * MIB])
def test_interrupted_put_leaves_no_object(store: ObjectStore, sent: int) -> None:
    def broken() -> Iterator[bytes]:
        yield b"x" * sent
        raise ConnectionResetError("the client went away")

    with pytest.raises(ConnectionResetError):
        store.put("files/a", broken())
    assert list(store.keys("")) == []


@pytest.mark.parametrize("start", [0, 5])
def test_reading_a_missing_object_raises_not_found(store: ObjectStore, start: int) -> None:
    store.put("files/a/b", [b"x"])
    for key in ("files/none", "files/a", "files/a/b/c"):
        with pytest.raises(ObjectNotFoundError, match=key):
            content(store, key, start)


def test_deleting_a_missing_object_is_no_error(store: ObjectStore) -> None:
    store.put("files/a", [b"x"])
    for key in ("files/a", "files/a", "none/at/all"):
        store.delete(key)
    assert list(store.keys("")) == []


def test_keys_are_listed_by_prefix_in_lexical_order(store: ObjectStore) -> None:
    keys = ["b/parts/2", "b/parts/10", "b/parts.x", "b/parts-1/z", "b/part", "a", "c/1"]
    for key in keys:
        store.put(key, [b""])
    assert list(store.keys("")) == sorted(keys)
    assert list(store.keys("b/parts/")) == ["b/parts/10", "b/parts/2"]
    assert list(store.keys("b/parts/1")) == ["b/parts/10"]
    assert list(store.keys("b/parts")) == ["b/parts-1/z", "b/parts.x", "b/parts/10", "b/parts/2"]
    assert list(store.keys("none/")) == []
    assert list(store.keys("a/")) == []


@pytest.mark.parametrize("key", ["../a", "a/../../b", "/etc/passwd", "a//b", ".staging/a", "", "a/", "a\0b"])
def test_key_that_could_leave_the_store_is_refused(store: ObjectStore, key: str) -> None:
    with pytest.raises(ObjectStoreError, match="not allowed"):
        store.put(key, [b"x"])
    with pytest.raises(ObjectStoreError, match="not allowed"):
        content(store, key)
    with pytest.raises(ObjectStoreError, match="not allowed"):
        store.delete(key)


def test_available_store_passes_its_check(store: ObjectStore) -> None:
    store.check()


def test_missing_directory_fails_its_check(tmp_path: Path) -> None:
    opened = open_object_store(ObjectStoreLocation(kind="directory", root=str(tmp_path / "objects")))
    (tmp_path / "objects" / ".staging").rmdir()
    with pytest.raises(ObjectStoreError, match="gone"):
        opened.check()


def test_directory_keeps_no_temporary_files(tmp_path: Path) -> None:
    opened = open_object_store(ObjectStoreLocation(kind="directory", root=str(tmp_path)))
    opened.put("files/a", [b"x"])
    with pytest.raises(ObjectStoreError):
        opened.put("files/a/b", [b"x"])
    assert list((tmp_path / ".staging").iterdir()) == []


def test_missing_bucket_fails_its_check(s3_location: ObjectStoreLocation) -> None:
    location = ObjectStoreLocation(kind="s3", bucket="none", endpoint_url=s3_location.endpoint_url, region="us-east-1")
    with pytest.raises(ObjectStoreError, match="'none'"):
        open_object_store(location).check()


def test_unreachable_endpoint_raises_object_store_error(s3_location: ObjectStoreLocation) -> None:
    location = ObjectStoreLocation(kind="s3", bucket="b", endpoint_url="http://127.0.0.1:9", region=s3_location.region)
    with pytest.raises(ObjectStoreError, match="EndpointConnectionError"):
        content(open_object_store(location), "files/a")


def test_s3_keys_begin_with_the_prefix(s3_location: ObjectStoreLocation) -> None:
    opened = open_object_store(s3_location)
    opened.put("files/below", [b"x"])
    client = boto3.client("s3", endpoint_url=s3_location.endpoint_url, region_name=s3_location.region)
    assert client.get_object(Bucket="cloister", Key="some/stack/files/below")["Body"].read() == b"x"
    client.close()
    assert opened.location() == s3_location


# URLs that need no credentials


@pytest.fixture
def s3_store(s3_location: ObjectStoreLocation) -> ObjectStore:
    return open_object_store(s3_location)


def test_presigned_url_reads_a_range_of_an_object(s3_store: ObjectStore) -> None:
    s3_store.put("files/a b", [b"0123456789"])
    url = s3_store.read_url("files/a b", expires_s=60)
    answer = httpx.get(url, headers={"range": "bytes=3-5"})
    assert (answer.status_code, answer.content) == (206, b"345")
    assert httpx.get(url).content == b"0123456789"


def test_presigned_url_writes_an_object(s3_store: ObjectStore) -> None:
    url = s3_store.write_url("files/new", expires_s=60)
    for data in (b"first", b"second"):
        assert httpx.put(url, content=data).status_code == 200
        assert content(s3_store, "files/new") == data


def test_presigned_url_of_a_missing_object_is_not_found(s3_store: ObjectStore) -> None:
    assert httpx.get(s3_store.read_url("files/none", expires_s=60)).status_code == 404


@pytest.mark.parametrize("endpoint_url", ["http://127.0.0.1:9", ""], ids=["own server", "AWS"])
@pytest.mark.parametrize(("method", "other"), [("GET", "PUT"), ("PUT", "GET")])
def test_presigned_url_is_for_one_method_one_object_and_some_time(
    s3_location: ObjectStoreLocation, endpoint_url: str, method: str, other: str
) -> None:
    location = ObjectStoreLocation(kind="s3", bucket="b", endpoint_url=endpoint_url, region=s3_location.region)
    opened = open_object_store(location)
    url = (opened.read_url if method == "GET" else opened.write_url)("files/mine", expires_s=60)
    now = datetime.now(UTC)
    assert s3_accepts(method, url, now)
    assert s3_accepts(method, url, now + timedelta(seconds=58))
    assert not s3_accepts(method, url, now + timedelta(seconds=61))
    assert not s3_accepts(method, url.replace("X-Amz-Expires=60", "X-Amz-Expires=600"), now)
    assert not s3_accepts(method, url.replace("files/mine", "files/other"), now)
    assert not s3_accepts(other, url, now)


def test_presigned_url_on_aws_is_in_the_region_of_the_bucket(s3_location: ObjectStoreLocation) -> None:
    del s3_location  # sets credentials
    opened = open_object_store(ObjectStoreLocation(kind="s3", bucket="cloister", region="eu-west-1"))
    for url in (opened.read_url("files/a", expires_s=60), opened.write_url("files/a", expires_s=60)):
        assert urllib.parse.urlsplit(url).netloc == "cloister.s3.eu-west-1.amazonaws.com"


def test_url_of_a_directory_names_the_file_of_an_object(tmp_path: Path) -> None:
    opened = open_object_store(ObjectStoreLocation(kind="directory", root=str(tmp_path / "my objects")))
    opened.put("files/a b#1", [b"x"])
    url = opened.read_url("files/a b#1", expires_s=60)
    assert url == opened.write_url("files/a b#1", expires_s=60) == f"file://{tmp_path}/my%20objects/files/a%20b%231"
    assert Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path)).read_bytes() == b"x"


@pytest.mark.parametrize("key", ["../a", "a/../../b", "/etc/passwd", ".staging/a", ""])
def test_key_that_could_leave_the_store_has_no_url(store: ObjectStore, key: str) -> None:
    for url in (store.read_url, store.write_url):
        with pytest.raises(ObjectStoreError, match="not allowed"):
            url(key, expires_s=60)


def test_url_of_a_missing_object_can_be_made(store: ObjectStore) -> None:
    assert store.read_url("files/none", expires_s=60)
    assert store.write_url("batches/new/parts/1", expires_s=60)


# Listings for the deletion of orphans


def test_objects_are_listed_after_a_key_with_their_time(store: ObjectStore) -> None:
    keys = ["b/1/plan", "b/1/parts/2", "b/1.x", "b/10/plan", "b/2", "c"]
    for key in keys:
        store.put(key, [b"x"])
    ordered = sorted(keys[:-1])
    found = list(store.objects("b/"))
    assert [each.key for each in found] == ordered
    assert all(abs(datetime.now(UTC) - each.modified_at) < timedelta(minutes=1) for each in found)
    for number, key in enumerate(ordered):
        assert [each.key for each in store.objects("b/", after=key)] == ordered[number + 1 :]
    assert list(store.objects("b/", after="b0")) == []
    assert [each.key for each in store.objects("b/", after="a/z")] == ordered


def test_directory_is_listed_without_all_names_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.adapters.directory_object_store._NAMES", 3)
    opened = open_object_store(ObjectStoreLocation(kind="directory", root=str(tmp_path)))
    keys = sorted([*(f"files/{number:02}" for number in range(10)), "files/03/deep", "files/a/b"])
    for key in set(keys) - {"files/03"}:
        opened.put(key, [b""])
    keys.remove("files/03")
    assert list(opened.keys("")) == keys
    assert [each.key for each in opened.objects("files/", after="files/04")] == [
        key for key in keys if key > "files/04"
    ]


def test_unfinished_uploads_are_deleted_once_they_are_old(store: ObjectStore) -> None:
    began = iter([b"x" * 20 * MIB, b"y" * 20 * MIB])
    seen: list[int] = []

    def chunks() -> Iterator[bytes]:
        for chunk in began:
            # While the object is written, an upload that is not old is kept.
            seen.append(store.abort_uploads("files/", before=datetime(2009, 1, 1, tzinfo=UTC)))
            yield chunk

    store.put("files/a", chunks())
    assert seen == [0, 0]
    assert store.abort_uploads("files/", before=datetime.now(UTC) + timedelta(hours=1)) == 0


def test_unfinished_multipart_upload_below_the_prefix_is_aborted(s3_location: ObjectStoreLocation) -> None:
    client = boto3.client("s3", endpoint_url=s3_location.endpoint_url, region_name=s3_location.region)
    for key in ("some/stack/files/died", "some/stack/models/weights"):
        client.create_multipart_upload(Bucket="cloister", Key=key)
    opened = open_object_store(s3_location)
    assert opened.abort_uploads("files/", before=datetime.now(UTC)) == 1
    left = client.list_multipart_uploads(Bucket="cloister")["Uploads"]
    assert [upload["Key"] for upload in left] == ["some/stack/models/weights"]
    client.close()


def test_unfinished_files_of_a_directory_are_deleted(tmp_path: Path) -> None:
    opened = open_object_store(ObjectStoreLocation(kind="directory", root=str(tmp_path)))
    opened.put("batches/b/parts/done", [b"x"])
    staged, of_a_job = tmp_path / ".staging" / "0a", tmp_path / "batches" / "b" / "parts" / ".0b"
    for path in (staged, of_a_job):
        path.write_bytes(b"secret")
    assert opened.abort_uploads("batches/", before=datetime.now(UTC) - timedelta(hours=1)) == 0
    assert opened.abort_uploads("batches/", before=datetime.now(UTC) + timedelta(hours=1)) == 2
    assert not staged.exists()
    assert not of_a_job.exists()
    assert list(opened.keys("")) == ["batches/b/parts/done"]


# Buckets with versions


@pytest.fixture(params=["Enabled", "Suspended"])
def versioned(request: pytest.FixtureRequest, s3_location: ObjectStoreLocation) -> Iterator["Versioned"]:
    with Versioned(s3_location, f"versioned-{request.param.lower()}") as bucket:
        bucket.set_versioning("Enabled")
        for data in (b"one", b"two"):
            bucket.store.put("files/a", [data])
        bucket.set_versioning(request.param)
        yield bucket


class Versioned:
    """A new bucket with its store and a client."""

    def __init__(self, server: ObjectStoreLocation, name: str, *, locks: bool = False) -> None:
        self.name = name
        self.client = boto3.client("s3", endpoint_url=server.endpoint_url, region_name=server.region)
        self.client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=locks)
        location = ObjectStoreLocation(
            kind="s3", bucket=name, prefix="p", endpoint_url=server.endpoint_url, region=server.region
        )
        self.store = open_object_store(location)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for key, version in self.versions():
            self.client.delete_object(Bucket=self.name, Key=key, VersionId=version, BypassGovernanceRetention=True)
        self.client.delete_bucket(Bucket=self.name)
        self.client.close()

    def set_versioning(self, status: str) -> None:
        self.client.put_bucket_versioning(Bucket=self.name, VersioningConfiguration={"Status": status})

    def versions(self) -> list[tuple[str, str]]:
        """Keys and ids of all versions and delete markers."""
        page = self.client.list_object_versions(Bucket=self.name)
        return [
            (each["Key"], each["VersionId"]) for kind in ("Versions", "DeleteMarkers") for each in page.get(kind, [])
        ]


def test_deletion_leaves_no_version(versioned: Versioned) -> None:
    versioned.store.put("files/ab", [b"of another key"])
    assert len(versioned.store.delete("files/a")) == 2
    assert [key for key, _ in versioned.versions()] == ["p/files/ab"]
    assert versioned.store.delete("files/a") == ()


def test_object_whose_versions_are_hidden_is_listed_and_deleted(s3_location: ObjectStoreLocation) -> None:
    with Versioned(s3_location, "hidden") as bucket:
        bucket.set_versioning("Enabled")
        for key in ("files/a", "files/hidden"):
            bucket.store.put(key, [b"x"])
        bucket.client.delete_object(Bucket="hidden", Key="p/files/hidden")
        assert list(bucket.store.keys("")) == ["files/a"]
        assert [each.key for each in bucket.store.objects("files/")] == ["files/a", "files/hidden"]
        assert [each.key for each in bucket.store.objects("files/", after="files/a")] == ["files/hidden"]
        bucket.store.delete("files/hidden")
        assert [key for key, _ in bucket.versions()] == ["p/files/a"]


def test_versions_of_a_bucket_that_has_just_got_versioning_are_deleted(s3_location: ObjectStoreLocation) -> None:
    with Versioned(s3_location, "changed") as bucket:
        bucket.store.delete("files/none")
        bucket.set_versioning("Enabled")
        bucket.store.put("files/a", [b"x"])
        bucket.store.delete("files/a")
        assert bucket.versions() == []


def test_check_of_a_bucket_with_versions_leaves_nothing(versioned: Versioned) -> None:
    before = versioned.versions()
    versioned.store.check()
    assert versioned.versions() == before


def test_bucket_whose_versions_cannot_be_deleted_fails_its_check(versioned: Versioned) -> None:
    statement = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:DeleteObject*",
        "Resource": [f"arn:aws:s3:::{versioned.name}", f"arn:aws:s3:::{versioned.name}/*"],
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    versioned.client.put_bucket_policy(Bucket=versioned.name, Policy=policy)
    with pytest.raises(
        ObjectVersionsError, match=r"allow the service s3:ListBucketVersions and s3:DeleteObjectVersion"
    ):
        versioned.store.check()
    location = versioned.store.location()
    url = f"s3://{location.bucket}/p?endpoint_url={location.endpoint_url}&region={location.region}"
    names = {"CLOISTER_DATABASE_URL": "dbname=x", "CLOISTER_OBJECT_STORE": url, "CLOISTER_MODELS": "/x"}
    [finding] = check_object_store(read_settings(names))
    assert finding.result is Result.FAILED
    assert "s3:DeleteObjectVersion" in finding.message
    versioned.client.delete_bucket_policy(Bucket=versioned.name)


def test_object_under_a_legal_hold_is_reported(s3_location: ObjectStoreLocation) -> None:
    with Versioned(s3_location, "held", locks=True) as bucket:
        bucket.store.put("files/a", [b"x"])
        hold = {"Bucket": "held", "Key": "p/files/a"}
        bucket.client.put_object_legal_hold(**hold, LegalHold={"Status": "ON"})
        with pytest.raises(ObjectVersionsError, match=r"'files/a'.*legal hold"):
            bucket.store.delete("files/a")
        bucket.client.put_object_legal_hold(**hold, LegalHold={"Status": "OFF"})
        assert bucket.store.delete("files/a")


def test_bucket_with_a_default_retention_fails_its_check(s3_location: ObjectStoreLocation) -> None:
    with Versioned(s3_location, "locked", locks=True) as bucket:
        bucket.store.check()
        rule = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}}
        configuration = {"ObjectLockEnabled": "Enabled", "Rule": rule}
        bucket.client.put_object_lock_configuration(Bucket="locked", ObjectLockConfiguration=configuration)
        with pytest.raises(ObjectVersionsError, match="default retention"):
            open_object_store(bucket.store.location()).check()
