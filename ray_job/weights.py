"""``python -m ray_job.weights``: copy a model's directory from the object store, before the pod's own work begins.

A model with a digest is checked on the way: each file must have the SHA-256 that the manifest of this digest states. An
engine that reads such a model in place checks it before it starts.

It runs in an init container. If that failed, Kubernetes would recreate the pod for as long as the batch may run, and
nobody would learn why. So a failed copy leaves a note in place of the model, and the job reads the note and ends with
its text, which the batch's owner can read.
"""

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from ray_job.contract.job_spec import JobSpecError, ModelSpec, ObjectStoreLocation
from ray_job.contract.model_manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, ManifestError, ModelManifest
from ray_job.contract.weights import MODELS_DIRECTORY, WEIGHTS_VARIABLE, WeightsCopy
from ray_job.errors import EngineUnavailableError, NoModelError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from pyarrow.fs import FileSystem

CHUNK_BYTES: Final = 16 << 20
# Four files at once fill a network of 10 Gbit/s. More would only need more memory.
THREADS: Final = 4
PAUSES_S: Final = (5, 20)
"""Pauses before each retry of a copy. They are short, because a GPU waits."""
_NO_MODEL: Final = "no-model.txt"
_NOT_COPIED: Final = "model-not-copied.txt"
_WEIGHT_FILES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data")
# Beside *.safetensors these hold the same weights again. A *.pt may be a layer that no other file holds.
_SECOND_FORMATS: Final = (".bin", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data")
# Directories in which published models hold the same weights for other programs.
_FOR_OTHER_PROGRAMS: Final = ("original/", "metal/", "onnx/", "openvino/")
# A file occupies whole blocks of a volume.
_BLOCK_BYTES: Final = 4096


def prepare(copy: WeightsCopy, pauses_s: Iterable[float] = PAUSES_S) -> str:
    """Copy the model, or leave a note in its place.

    Args:
        copy: the model and the target directory.
        pauses_s: seconds to wait before each retry.

    Returns:
        One line that describes the result.

    Raises:
        OSError: the note cannot be written.
    """
    directory = Path(copy.directory)
    for note in (_NO_MODEL, _NOT_COPIED):
        (directory / note).unlink(missing_ok=True)
    pauses = iter(pauses_s)
    while True:
        try:
            return f"copied {copy_model(copy) / 2**30:.1f} GiB"
        except NoModelError as error:
            note, text = _NO_MODEL, str(error)
            break
        except OSError as error:
            pause_s = next(pauses, None)
            if pause_s is None:
                note = _NOT_COPIED
                text = (
                    f"the model could not be copied to {directory}: {' '.join(str(error).split())}; see that the "
                    "object store answers, that the key of jobs may list and read there, and that the node's disk is "
                    "not full"
                )
                break
            sys.stderr.write(f"{error}; trying again in {pause_s} s\n")
            time.sleep(pause_s)
    shutil.rmtree(directory, ignore_errors=True)  # half a model is useless, and may be what filled the disk
    directory.mkdir(parents=True, exist_ok=True)
    (directory / note).write_text(text)
    return text


def require_model(source: str) -> None:
    """Check that a model's directory holds no note of a failed copy.

    Raises:
        NoModelError: the copy failed, and would fail again in another attempt.
        EngineUnavailableError: the copy failed, and may succeed in another attempt.
    """
    for name, error in ((_NO_MODEL, NoModelError), (_NOT_COPIED, EngineUnavailableError)):
        note = Path(source) / name
        if note.is_file():
            raise error(note.read_text())


def verify_model(model: ModelSpec) -> None:
    """Check every file of a model with a digest that its engine reads in place.

    Below ``MODELS_DIRECTORY`` are copies, which ``copy_model`` has checked.

    Raises:
        NoModelError: a file is missing, differs from the manifest or is not in it; the message names the first one.
    """
    directory = Path(model.source)
    if not model.digest or directory.is_relative_to(MODELS_DIRECTORY):
        return
    try:
        with (directory / MANIFEST_NAME).open("rb") as manifest_file:
            manifest = read_manifest(manifest_file, model.digest)
        known = {directory / name for name in (MANIFEST_NAME, *(file.path for file in manifest.files))}
        if added := [path for path in directory.rglob("*") if path not in known and not path.is_dir()]:
            # An engine loads every *.safetensors of its directory.
            raise NoModelError(
                f"{added[0]} is not in the manifest of the model {model.digest}: find out who added it, and delete it"
            )
        with ThreadPoolExecutor(THREADS) as executor:
            found = executor.map(lambda file: _file_digest(directory / file.path), manifest.files)
            for file, sha256 in zip(manifest.files, found, strict=True):
                if sha256 != file.sha256:
                    raise _tampered(file.path, file.sha256, sha256, model.digest)
    except OSError as error:
        raise NoModelError(
            f"the model {model.digest} cannot be read in {directory}: {error.strerror} ({error.filename}). Push it "
            "again with `cloister models push`"
        ) from error


def read_manifest(stream: "BinaryIO", digest: str) -> ModelManifest:
    """Read the manifest of a model, which must have its digest.

    Raises:
        NoModelError: it has another digest, or is unreadable.
    """
    try:
        return ModelManifest.from_json(stream.read(MAX_MANIFEST_BYTES), digest)
    except ManifestError as error:
        raise NoModelError(f"{error}. Push the model again with `cloister models push`") from error


def copy_model(copy: WeightsCopy) -> int:
    """Copy the files of a model. Files that are already complete are left alone.

    Returns:
        The size of the model's files in bytes.

    Raises:
        NoModelError: there are no such objects, none of them is a model's configuration, the volume is too small, or a
            file differs from the manifest of the model's digest.
        OSError: the object store is unreachable or refuses access, or the node's disk is full.
    """
    file_system, base = open_file_system(copy.object_store)
    root = f"{base}/{copy.prefix.strip('/')}"
    files: dict[str, tuple[int, str | None]]
    if copy.digest:
        files = {file.path: (file.size_bytes, file.sha256) for file in _pinned(file_system, root, copy.digest).files}
    else:
        files = {name: (size_bytes, None) for name, size_bytes in _listed(file_system, root)}
    sizes = {name: size_bytes for name, (size_bytes, _) in files.items()}
    if "config.json" not in sizes:
        raise NoModelError(
            f"{root}/ in the object store holds no config.json: upload the model's whole directory there, or correct "
            "the model's source or model_weights.prefix"
        )
    loaded = loaded_files(sizes) if copy.load_format == "auto" else set(sizes)
    wanted = {name for name in loaded if copy.whole or not name.endswith(_WEIGHT_FILES)}
    larger_volume = "raise the model's weights_gib (model_weights.cache_gib where it has none) or "
    for content, names, volume_gib, remedy in (
        ("what an engine loads", loaded, copy.engine_volume_gib, larger_volume),
        ("what is not weights", wanted, copy.volume_gib, ""),
    ):
        needed_gib = sum(sizes[name] + _BLOCK_BYTES for name in names) / 2**30
        if needed_gib > volume_gib:  # Kubernetes would evict the pod in the middle of the copy
            raise NoModelError(
                f"{content} of {root}/ in the object store takes {needed_gib:.2f} GiB, and the volume for it holds "
                f"{volume_gib} GiB: {remedy}delete what is not of the model"
            )

    def copy_file(name: str) -> None:
        target, expected = Path(copy.directory) / name, files[name][1]
        is_complete = target.is_file() and target.stat().st_size == sizes[name]
        if is_complete and (expected is None or _file_digest(target) == expected):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.partial")
        digest = hashlib.sha256()
        with file_system.open_input_stream(f"{root}/{name}") as stream, partial.open("wb") as file:
            while chunk := stream.read(CHUNK_BYTES):
                file.write(chunk)
                if expected is not None:
                    digest.update(chunk)
        if expected is not None and digest.hexdigest() != expected:
            raise _tampered(name, expected, digest.hexdigest(), copy.digest)
        partial.rename(target)

    with ThreadPoolExecutor(THREADS) as executor:
        copies = [executor.submit(copy_file, name) for name in sorted(wanted)]
        for finished in copies:
            finished.result()
    return sum(sizes[name] for name in wanted)


def _pinned(file_system: "FileSystem", root: str, digest: str) -> ModelManifest:
    """Return the manifest of a digest from a directory of the object store."""
    try:
        with file_system.open_input_stream(f"{root}/{MANIFEST_NAME}") as stream:
            return read_manifest(stream, digest)
    except FileNotFoundError as error:
        raise NoModelError(
            f"{root}/ in the object store holds no {MANIFEST_NAME}: push the model with `cloister models push`"
        ) from error


def _listed(file_system: "FileSystem", root: str) -> "Iterator[tuple[str, int]]":
    """Yield the path below a directory of the object store, and the size in bytes, of each file."""
    from pyarrow.fs import FileSelector, FileType

    for info in file_system.get_file_info(FileSelector(root, allow_not_found=True, recursive=True)):
        if info.type == FileType.File:
            yield info.path.removeprefix(f"{root}/"), info.size


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tampered(name: str, expected: str, found: str, digest: str) -> NoModelError:
    return NoModelError(
        f"{name} of the model {digest} has the SHA-256 {found}, and its manifest states {expected}: the file was "
        "changed or damaged in the object store. Run `cloister models verify`, and push the model again"
    )


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


def loaded_files(names: Collection[str]) -> set[str]:
    """Return the files of a model that vLLM needs by default: of weights in several formats only ``*.safetensors``.

    Source: vLLM's default loader, which prefers the ``*.safetensors`` of the directory itself.
    """
    directories = {PurePosixPath(name).parent for name in names if name.endswith(".safetensors")}
    if PurePosixPath() not in directories:
        return set(names)
    return {
        name
        for name in names
        if not (name.startswith(_FOR_OTHER_PROGRAMS) and name.endswith(_WEIGHT_FILES))
        and not (name.endswith(_SECOND_FORMATS) and PurePosixPath(name).parent in directories)
    }


def main() -> int:
    """Copy the model that the environment names, and return the exit code."""
    try:
        result = prepare(WeightsCopy.from_json(os.environ.get(WEIGHTS_VARIABLE, "")))
    except (JobSpecError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{result}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
