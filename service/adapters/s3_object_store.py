"""An object store in an S3 bucket, through boto3.

boto3 finds the credentials in its usual places: environment, profile, identity of the pod or machine.
"""

import contextlib
import hashlib
import itertools
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from ray_job.contract.job_spec import ObjectStoreLocation
from service.adapters.directory_object_store import check_key
from service.errors import ObjectNotFoundError, ObjectStoreError, ObjectVersionsError
from service.ports import ListedObject, StoredObject

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef, ListObjectVersionsRequestTypeDef

_CHUNK_BYTES: Final = 1 << 20
# An upload to S3 has at most 10,000 parts of at least 5 MiB. This size allows objects of 160 GB; one part is in memory.
_PART_BYTES: Final = 16 << 20
_NO_SUCH_OBJECT: Final = "NoSuchKey"
# The key of no object. Whether its versions can be deleted shows whether those of others can.
_PROBE: Final = "doctor/versions"
# Readiness probes come every few seconds. Versioning and rights of a bucket change rarely.
_LOOK_INTERVAL_S: Final = 300.0
# HTTP statuses of servers that know no versioning, or whose versioning is not configured.
_UNKNOWN_REQUEST: Final = frozenset({405, 501})
# HTTP statuses of a version that must not be deleted: some servers answer 400 for Object Lock.
_REFUSED: Final = frozenset({400, 403, *_UNKNOWN_REQUEST})
_VERSIONS_ADVICE: Final = (
    "The bucket keeps versions: allow the service s3:ListBucketVersions and s3:DeleteObjectVersion, or use a bucket "
    "that never had versioning. A retention or a legal hold of S3 Object Lock must end or be removed"
)


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        code = error.response["Error"].get("Code", "")
        kind = ObjectNotFoundError if code == _NO_SUCH_OBJECT else ObjectStoreError
        raise kind(f"cannot {doing}: S3 answered {code}") from error
    except BotoCoreError as error:
        raise ObjectStoreError(f"cannot {doing}: {type(error).__name__}") from error


def _http_status(error: ClientError) -> int:
    return error.response["ResponseMetadata"]["HTTPStatusCode"]


@contextlib.contextmanager
def _versions_translated(doing: str) -> Iterator[None]:
    try:
        with _translated(doing):
            yield
    except ObjectStoreError as error:
        # Other failures, such as an unreachable server, have nothing to do with versions.
        if isinstance(error.__cause__, ClientError) and _http_status(error.__cause__) in _REFUSED:
            raise ObjectVersionsError(f"{error}. {_VERSIONS_ADVICE}") from error
        raise


class S3ObjectStore:
    """Keeps objects in a bucket, below a prefix. S3 is not contacted before the first request."""

    def __init__(self, location: ObjectStoreLocation) -> None:
        self._location = location
        own_endpoint = bool(location.endpoint_url)
        self._client: S3Client = boto3.client(
            "s3",
            endpoint_url=location.endpoint_url or None,
            region_name=location.region or None,
            config=Config(
                connect_timeout=5,
                read_timeout=60,
                # Presigned URLs would have the older signature otherwise, which some servers and regions refuse.
                signature_version="s3v4",
                retries={"mode": "standard", "total_max_attempts": 4},
                # S3-compatible servers may not support AWS's trailing checksums, or buckets as host names.
                request_checksum_calculation="when_required" if own_endpoint else "when_supported",
                response_checksum_validation="when_required" if own_endpoint else "when_supported",
                # Presigned URLs name the host of the region only in these two styles: the style auto signs for the
                # global host, which redirects, and which VPC endpoints do not reach. Certificates of the virtual
                # hosts do not cover names with dots.
                s3={"addressing_style": "path" if own_endpoint or "." in location.bucket else "virtual"},
            ),
        )
        self._bucket = location.bucket
        prefix = location.prefix.strip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._keeps_versions = False
        # When the bucket, and the rights in it, were looked at, in monotonic seconds.
        self._looked_at = self._checked_at = float("-inf")

    def put(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        """See ``service.ports.ObjectStore.put``. Holds at most 32 MiB of the object in memory."""
        check_key(key)
        digest = hashlib.sha256()
        size_bytes = 0

        def measured() -> Iterator[bytes]:
            nonlocal size_bytes
            for chunk in chunks:
                digest.update(chunk)
                size_bytes += len(chunk)
                yield chunk

        def joined() -> Iterator[bytes]:
            waiting = bytearray()
            for chunk in measured():
                waiting += chunk
                while len(waiting) >= _PART_BYTES:
                    yield bytes(waiting[:_PART_BYTES])
                    del waiting[:_PART_BYTES]
            if waiting:
                yield bytes(waiting)

        parts = joined()
        first, second = next(parts, b""), next(parts, None)
        if second is None:
            with _translated(f"write the object {key!r}"):
                self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=first)
        else:
            self._put_in_parts(key, itertools.chain((first, second), parts))
        return StoredObject(size_bytes=size_bytes, sha256=digest.digest())

    def _put_in_parts(self, key: str, parts: Iterable[bytes]) -> None:
        doing = f"write the object {key!r}"
        full_key = self._prefix + key
        with _translated(doing):
            upload_id = self._client.create_multipart_upload(Bucket=self._bucket, Key=full_key)["UploadId"]
        try:
            done: list[CompletedPartTypeDef] = []
            for number, part in enumerate(parts, start=1):
                with _translated(doing):
                    answer = self._client.upload_part(
                        Bucket=self._bucket, Key=full_key, UploadId=upload_id, PartNumber=number, Body=part
                    )
                done.append({"PartNumber": number, "ETag": answer["ETag"]})
            with _translated(doing):
                self._client.complete_multipart_upload(
                    Bucket=self._bucket, Key=full_key, UploadId=upload_id, MultipartUpload={"Parts": done}
                )
        except BaseException:
            # Parts of an unfinished upload cost money and are not listed. The first error is the one to report.
            with contextlib.suppress(ClientError, BotoCoreError):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=full_key, UploadId=upload_id)
            raise

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        """See ``service.ports.ObjectStore.read``."""
        check_key(key)
        with _translated(f"read the object {key!r}"):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key, Range=f"bytes={start}-")
            except ClientError as error:
                # S3 refuses a range that starts at or after the end, and so every range of an empty object.
                if error.response["Error"].get("Code") == "InvalidRange":
                    return
                raise
            with contextlib.closing(answer["Body"]) as body:
                yield from body.iter_chunks(_CHUNK_BYTES)

    def keys(self, prefix: str) -> Iterator[str]:
        """See ``service.ports.ObjectStore.keys``."""
        with _translated(f"list the objects that start with {prefix!r}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            for page in pages:
                for entry in page.get("Contents", []):
                    yield entry["Key"].removeprefix(self._prefix)

    def objects(self, prefix: str, *, after: str = "") -> Iterator[ListedObject]:
        """See ``service.ports.ObjectStore.objects``."""
        start = self._prefix + after if after else ""
        entries = self._versions(prefix, start) if self._has_versions() else self._current(prefix, start)
        for key, versions in itertools.groupby(entries, key=lambda entry: entry[0]):
            if key > start:
                newest = max(modified_at for _, modified_at in versions)
                yield ListedObject(key=key.removeprefix(self._prefix), modified_at=newest)

    def _current(self, prefix: str, start: str) -> Iterator[tuple[str, datetime]]:
        with _translated(f"list the objects that start with {prefix!r}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix, StartAfter=start
            )
            for page in pages:
                yield from ((entry["Key"], entry["LastModified"]) for entry in page.get("Contents", []))

    def _versions(self, prefix: str, start: str) -> Iterator[tuple[str, datetime]]:
        with _versions_translated(f"list the versions of objects that start with {prefix!r}"):
            # boto3's paginator cannot start after a key.
            marker, version_marker, is_truncated = start, "", True
            while is_truncated:
                where: ListObjectVersionsRequestTypeDef = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
                if marker:
                    where |= {"KeyMarker": marker}
                if version_marker:
                    where |= {"VersionIdMarker": version_marker}
                page = self._client.list_object_versions(**where)
                entries = (*page.get("Versions", []), *page.get("DeleteMarkers", []))
                yield from sorted((entry["Key"], entry["LastModified"]) for entry in entries)
                is_truncated = page["IsTruncated"]
                marker, version_marker = page.get("NextKeyMarker", ""), page.get("NextVersionIdMarker", "")

    def delete(self, key: str) -> tuple[str, ...]:
        """See ``service.ports.ObjectStore.delete``. In a bucket without versions this is one request."""
        check_key(key)
        if not self._has_versions():
            with _translated(f"delete the object {key!r}"):
                answer = self._client.delete_object(Bucket=self._bucket, Key=self._prefix + key)
            # The bucket may have got versioning a moment ago: the object is hidden then, and not deleted.
            if not (answer.get("DeleteMarker") or answer.get("VersionId")):
                return ()
            self._keeps_versions = True
        full_key = self._prefix + key
        with _versions_translated(f"delete all versions of the object {key!r}"):
            versions, markers = [], []
            pages = self._client.get_paginator("list_object_versions").paginate(Bucket=self._bucket, Prefix=full_key)
            for page in pages:
                found, hidden = page.get("Versions", []), page.get("DeleteMarkers", [])
                versions += [entry["VersionId"] for entry in found if entry["Key"] == full_key]
                markers += [entry["VersionId"] for entry in hidden if entry["Key"] == full_key]
                # Longer keys come after it.
                if any(entry["Key"] != full_key for entry in (*found, *hidden)):
                    break
            # The oldest first, so that no older content becomes the current one.
            for version in (*reversed(versions), *markers):
                self._client.delete_object(Bucket=self._bucket, Key=full_key, VersionId=version)
        return tuple(versions)

    def _has_versions(self) -> bool:
        """Return whether the bucket keeps versions, or kept them before versioning was suspended."""
        if not self._keeps_versions and time.monotonic() - self._looked_at >= _LOOK_INTERVAL_S:
            doing = f"find out whether the bucket {self._bucket!r} keeps versions"
            try:
                self._keeps_versions = bool(self._client.get_bucket_versioning(Bucket=self._bucket).get("Status"))
            except ClientError as error:
                code = error.response["Error"].get("Code", "")
                if _http_status(error) == HTTPStatus.FORBIDDEN:
                    advice = "Allow the service s3:GetBucketVersioning: hidden versions would outlive every deletion"
                    raise ObjectVersionsError(f"cannot {doing}: S3 answered {code}. {advice}") from error
                if _http_status(error) not in _UNKNOWN_REQUEST:
                    raise ObjectStoreError(f"cannot {doing}: S3 answered {code}") from error
            except BotoCoreError as error:
                raise ObjectStoreError(f"cannot {doing}: {type(error).__name__}") from error
            self._looked_at = time.monotonic()
        return self._keeps_versions

    def _check_versions(self) -> None:
        """Raise ObjectVersionsError unless the service can delete all versions of its objects."""
        if not self._has_versions() or time.monotonic() - self._checked_at < _LOOK_INTERVAL_S:
            return
        key = self._prefix + _PROBE
        with _versions_translated(f"delete versions in the bucket {self._bucket!r}"):
            self._client.list_object_versions(Bucket=self._bucket, Prefix=key, MaxKeys=1)
            # The right is checked although no object has this key.
            self._client.delete_object(Bucket=self._bucket, Key=key, VersionId="null")
        rule = None
        # Most buckets have no Object Lock, and some servers do not know it.
        with contextlib.suppress(ClientError, BotoCoreError):
            answer = self._client.get_object_lock_configuration(Bucket=self._bucket)
            rule = answer["ObjectLockConfiguration"].get("Rule")
        if rule:
            raise ObjectVersionsError(
                f"the bucket {self._bucket!r} has a default retention of S3 Object Lock, which forbids every deletion "
                "for a time. Remove the default retention, or use another bucket"
            )
        self._checked_at = time.monotonic()

    def abort_uploads(self, prefix: str, *, before: datetime) -> int:
        """See ``service.ports.ObjectStore.abort_uploads``. Parts of an unfinished upload cost money and are hidden."""
        aborted = 0
        with _translated(f"abort unfinished uploads below {prefix!r}"):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            for page in pages:
                for upload in page.get("Uploads", []):
                    if upload["Initiated"] >= before:
                        continue
                    try:
                        self._client.abort_multipart_upload(
                            Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                        )
                    except self._client.exceptions.NoSuchUpload:
                        continue  # it has just ended
                    aborted += 1
        return aborted

    def read_url(self, key: str, *, expires_s: int) -> str:
        """Return a presigned URL for GET. It ends earlier if the credentials of this process do."""
        check_key(key)
        return self._presigned("get_object", key, expires_s)

    def write_url(self, key: str, *, expires_s: int) -> str:
        """Return a presigned URL for PUT. It ends earlier if the credentials of this process do."""
        check_key(key)
        return self._presigned("put_object", key, expires_s)

    def _presigned(self, operation: str, key: str, expires_s: int) -> str:
        with _translated(f"sign a URL of the object {key!r}"):
            return self._client.generate_presigned_url(
                operation, Params={"Bucket": self._bucket, "Key": self._prefix + key}, ExpiresIn=expires_s
            )

    def location(self) -> ObjectStoreLocation:
        """Return the bucket and prefix."""
        return self._location

    def check(self) -> None:
        """See ``service.ports.ObjectStore.check``."""
        with _translated(f"reach the bucket {self._bucket!r}"):
            self._client.head_bucket(Bucket=self._bucket)
        self._check_versions()
