"""Import of images into containerd, where pods find them by digest without a registry."""

import errno
import io
import json
import os
import re
import subprocess
import tarfile
from pathlib import Path
from typing import BinaryIO, Final

from tests.cluster.images.image import Image

_INDEX: Final = "application/vnd.oci.image.index.v1+json"


class ImportImageError(Exception):
    """containerd refused an image; the message contains its output."""


def import_image(image: Image, *, socket: Path) -> None:
    """Import and unpack an image; return at once if it has been imported already.

    On the same file system the blobs become hard links in containerd's store, and only unpacked files are copied.

    Args:
        image: image with its files.
        socket: socket of a containerd on this machine. Its garbage collection must be off (``schedule_delay`` of
            ``io.containerd.gc.v1.scheduler``), because blobs arrive before anything refers to them.

    Raises:
        ImportImageError: containerd refused; the message contains its output.
    """
    # An image has its name before it is unpacked.
    if image.reference in ctr(socket, "images", "check", "--quiet").split():
        return
    store = _content_store(socket)
    there = set(ctr(socket, "content", "ls", "--quiet").split())
    for digest, path in image.blobs().items():
        if digest not in there:
            _add_blob(digest, path, store=store, socket=socket)
    ctr(socket, "images", "import", "-", given=_index(image))


def known_images(socket: Path) -> set[str]:
    """Return the references of the images in a containerd.

    Args:
        socket: socket of containerd.
    """
    return {*ctr(socket, "images", "ls", "--quiet").split()}


def ctr(socket: Path, *arguments: str, given: bytes | BinaryIO | None = None) -> str:
    """Run ``ctr`` in the namespace of Kubernetes' images.

    Args:
        socket: socket of containerd.
        arguments: command and arguments.
        given: standard input.

    Returns:
        Its standard output.

    Raises:
        ImportImageError: it failed; the message contains its output.
    """
    command = ["ctr", "--address", str(socket), "--namespace", "k8s.io", *arguments]
    stream, content = (None, given) if isinstance(given, bytes) else (given or subprocess.DEVNULL, None)
    done = subprocess.run(command, stdin=stream, input=content, capture_output=True, check=False)
    if done.returncode:
        raise ImportImageError(f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr.decode()}")
    return done.stdout.decode()


def _add_blob(digest: str, path: Path, *, store: Path, socket: Path) -> None:
    place = store / "blobs" / digest.replace(":", "/")
    # A new containerd creates it with its first blob.
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, place)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    size = str(path.stat().st_size)
    with path.open("rb") as content:
        # containerd does not read the content of a file that is in the store already.
        command = ["content", "ingest", "--expected-digest", digest, "--expected-size", size, digest]
        ctr(socket, *command, given=content)


def _index(image: Image) -> bytes:
    """Return an archive that only names the image; its blobs are in the store already."""
    manifest = image.blob(image.digest)
    entry = {
        "mediaType": image.manifest()["mediaType"],
        "digest": image.digest,
        "size": manifest.stat().st_size,
        "annotations": {"io.containerd.image.name": image.reference},
    }
    files = {
        "oci-layout": {"imageLayoutVersion": "1.0.0"},
        "index.json": {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [entry]},
    }
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, content in files.items():
            text = json.dumps(content).encode()
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    return written.getvalue()


def _content_store(socket: Path) -> Path:
    """Return the directory in which containerd stores blobs."""
    details = ctr(socket, "plugins", "ls", "--detailed", "type==io.containerd.content.v1")
    found = re.search(r"^\s*(?:Exports:)?\s*root\s+(\S+)\s*$", details, flags=re.MULTILINE)
    if found is None:
        raise ImportImageError(f"containerd at {socket} does not say where its content store is:\n{details}")
    return Path(found[1])
