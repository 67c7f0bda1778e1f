"""An object store in an S3 bucket, through boto3.

boto3 finds the credentials in its usual places: environment, profile, identity of the pod or machine.
"""

import contextlib
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from ray_job.contract.job_spec import ObjectStoreLocation
from service.adapters.directory_object_store import check_key
from service.errors import ObjectNotFoundError, ObjectStoreError
from service.ports import StoredObject

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

_CHUNK_BYTES: Final = 1 << 20
# An upload to S3 has at most 10,000 parts of at least 5 MiB. This size allows objects of 160 GB; one part is in memory.
_PART_BYTES: Final = 16 << 20
_NO_SUCH_OBJECT: Final = "NoSuchKey"


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

    def delete(self, key: str) -> None:
        """See ``service.ports.ObjectStore.delete``."""
        check_key(key)
        with _translated(f"delete the object {key!r}"):
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + key)

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
