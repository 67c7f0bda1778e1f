"""The job's access to the object store, through PyArrow: stream the input, list and write parts."""

import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from ray_job.contract.job_spec import ObjectStoreLocation
from ray_job.contract.object_keys import part_key, parts_prefix
from ray_job.contract.parts import PartHeader, PartRow, decode_header, encode_part

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

CHUNK_BYTES: Final = 1 << 20


def open_file_system(location: ObjectStoreLocation) -> tuple["FileSystem", str]:
    """Open the object store.

    Returns:
        The file system, and the path below which it holds the keys.
    """
    from pyarrow import fs

    if location.kind == "directory":
        return fs.LocalFileSystem(), location.root.rstrip("/")
    scheme, _, host = location.endpoint_url.rpartition("://")
    file_system = fs.S3FileSystem(
        region=location.region or None,
        endpoint_override=host or None,
        scheme=scheme or "https",
    )
    return file_system, "/".join(part for part in (location.bucket, location.prefix.strip("/")) if part)


def read_chunks(location: ObjectStoreLocation, key: str) -> Iterator[bytes]:
    """Stream an object in chunks of 1 MiB."""
    file_system, base = open_file_system(location)
    with file_system.open_input_stream(f"{base}/{key}") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def read_part_headers(location: ObjectStoreLocation, batch_id: str) -> Iterator[PartHeader]:
    """Yield the headers of all committed parts of a batch.

    Raises:
        PartError: an object among the parts has no readable header.
    """
    from pyarrow.fs import FileSelector

    file_system, base = open_file_system(location)
    selector = FileSelector(f"{base}/{parts_prefix(batch_id).rstrip('/')}", allow_not_found=True)
    for info in file_system.get_file_info(selector):
        with file_system.open_input_stream(info.path) as stream:
            header = b""
            while b"\n" not in header and (chunk := stream.read(CHUNK_BYTES)):
                header += chunk
        yield decode_header(header[: header.find(b"\n") + 1], info.path)


def write_part(location: ObjectStoreLocation, batch_id: str, rows: Sequence[PartRow]) -> str:
    """Commit rows as one part object. A part with the same lines is replaced.

    Returns:
        The key of the part.
    """
    key = part_key(batch_id, [row.line for row in rows])
    write_object(location, key, encode_part(batch_id, rows))
    return key


def write_object(location: ObjectStoreLocation, key: str, data: bytes) -> None:
    """Write an object, completely or not at all. Replace an existing one."""
    file_system, base = open_file_system(location)
    if location.kind == "s3":
        with file_system.open_output_stream(f"{base}/{key}") as stream:
            stream.write(data)
        return
    # A directory shows unfinished files, so the object is written elsewhere and then renamed.
    staging = f"{base}/.staging"
    file_system.create_dir(staging, recursive=True)
    file_system.create_dir(f"{base}/{key.rpartition('/')[0]}", recursive=True)
    temporary = f"{staging}/{secrets.token_hex(8)}"
    with file_system.open_output_stream(temporary) as stream:
        stream.write(data)
    file_system.move(temporary, f"{base}/{key}")
