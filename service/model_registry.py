"""Models in the object store: pushed by operators, pinned by the digest of their manifest, never changed.

The manifest of a model is written last. Without it, the files below its prefix are an unfinished push.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Final

from ray_job.contract.model_manifest import (
    DIGEST,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    ManifestError,
    ModelFile,
    ModelManifest,
)
from ray_job.contract.object_keys import MODELS_PREFIX, manifest_key, model_prefix
from service.errors import CloisterError, ObjectNotFoundError
from service.model_directory import THREADS, ModelDirectoryError, read_chunks
from service.model_reports import read_small_object
from service.ports import ObjectStore

_KEY: Final = re.compile(rf"{MODELS_PREFIX}([0-9a-f]{{64}})/(.+)")


class RegistryError(CloisterError):
    """A model is missing in the object store, was changed there, or is in use. The message names the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A digest for which the object store has files; ``problem`` is why it has no valid manifest."""

    digest: str
    manifest: ModelManifest | None = None
    problem: str = ""


def push(
    store: ObjectStore,
    manifest: ModelManifest,
    files: Mapping[str, Path],
    *,
    report: Callable[[int], None] = lambda _bytes: None,
) -> int:
    """Store the files of a model and then its manifest.

    Files that are there with the same digest are not sent again; others are replaced.

    Args:
        store: the object store.
        manifest: the manifest.
        files: the files by path.
        report: receives the number of bytes that were sent, or found in the store.

    Returns:
        The number of files that were sent.

    Raises:
        ModelDirectoryError: a file has changed since it was hashed.
        ObjectStoreError: the store cannot be reached; the next push continues.
    """
    prefix = model_prefix(manifest.digest)
    stored = {key.removeprefix(prefix) for key in store.keys(prefix)}
    over = Event()

    def unchanged(file: ModelFile) -> Iterator[bytes]:
        """Yield the file, and fail at its end if it changed: the object is then not written."""
        digest = hashlib.sha256()
        for chunk in read_chunks(files[file.path]):
            if over.is_set():
                raise RegistryError(f"the push was interrupted at {file.path}: push the model again to finish it")
            digest.update(chunk)
            report(len(chunk))
            yield chunk
        if digest.hexdigest() != file.sha256:
            raise ModelDirectoryError(f"{files[file.path]} changed during the push: push the model again")

    def send(file: ModelFile) -> bool:
        key = f"{prefix}{file.path}"
        if file.path in stored and _object_digest(store, key, lambda _bytes: None) == file.sha256:
            report(file.size_bytes)
            return False
        store.put(key, unchanged(file))
        return True

    executor = ThreadPoolExecutor(THREADS, thread_name_prefix="push")
    try:
        sent = list(executor.map(send, manifest.files))
    finally:
        # After an error or Ctrl-C, the other files need not be sent first: they may have hundreds of gigabytes.
        over.set()
        executor.shutdown(cancel_futures=True)
    store.put(manifest_key(manifest.digest), [manifest.to_json()])
    return sum(sent)


def list_models(store: ObjectStore) -> list[StoredModel]:
    """Return the pushed models, by name and digest. Directories that were copied below the prefix are left out.

    Raises:
        ObjectStoreError: the store cannot be reached.
    """
    digests = dict.fromkeys(found[1] for key in store.keys(MODELS_PREFIX) if (found := _KEY.fullmatch(key)))
    models = [_stored(store, f"sha256:{digest}") for digest in digests]
    return sorted(models, key=lambda model: (model.manifest.name if model.manifest else "", model.digest))


def find_model(store: ObjectStore, name: str) -> StoredModel:
    """Return the model with a name or a digest.

    Raises:
        RegistryError: there is none, or several have the name.
        ObjectStoreError: the store cannot be reached.
    """
    if DIGEST.fullmatch(name):
        found = [_stored(store, name)] if next(iter(store.keys(model_prefix(name))), None) else []
    else:
        found = [model for model in list_models(store) if model.manifest and model.manifest.name == name]
    if len(found) > 1:
        digests = ", ".join(model.digest for model in found)
        raise RegistryError(f"{len(found)} models have the name {name!r}: give one of the digests {digests}")
    if not found:
        raise RegistryError(f"the object store has no model {name!r}; `cloister models list` lists them")
    return found[0]


def read_manifest(store: ObjectStore, digest: str) -> ModelManifest:
    """Return the manifest of a model, which has its digest.

    Raises:
        RegistryError: it is missing or was changed.
        ObjectStoreError: the store cannot be reached.
    """
    stored = _stored(store, digest)
    if stored.manifest is None:
        raise RegistryError(
            f"the model {digest} cannot be used: {stored.problem}. `cloister models list` lists the models"
        )
    return stored.manifest


def verify(
    store: ObjectStore, manifest: ModelManifest, *, report: Callable[[int], None] = lambda _bytes: None
) -> Iterator[str]:
    """Read and hash every object of a model; yield what is wrong with each that is not as the manifest states.

    Args:
        store: the object store.
        manifest: the manifest.
        report: receives the number of bytes that were read.

    Raises:
        ObjectStoreError: the store cannot be reached.
    """
    prefix = model_prefix(manifest.digest)

    def problem(file: ModelFile) -> str:
        found = _object_digest(store, f"{prefix}{file.path}", report)
        if found is None:
            return f"{file.path} is missing"
        return "" if found == file.sha256 else f"{file.path} has the SHA-256 {found}, and not {file.sha256}"

    with ThreadPoolExecutor(THREADS, thread_name_prefix="verify") as executor:
        yield from (found for found in executor.map(problem, manifest.files) if found)
    known = {MANIFEST_NAME, *(file.path for file in manifest.files)}
    yield from (
        f"{path} is not in the manifest"
        for key in store.keys(prefix)
        if (path := key.removeprefix(prefix)) not in known
    )


def remove(store: ObjectStore, digest: str) -> int:
    """Delete a model, its manifest first. Return the number of deleted objects.

    Raises:
        ObjectStoreError: the store cannot be reached; the next call continues.
    """
    store.delete(manifest_key(digest))
    keys = list(store.keys(model_prefix(digest)))
    with ThreadPoolExecutor(THREADS, thread_name_prefix="remove") as executor:
        list(executor.map(store.delete, keys))
    return len(keys) + 1


def _object_digest(store: ObjectStore, key: str, report: Callable[[int], None]) -> str | None:
    """Return the SHA-256 of an object in hexadecimal; None if it is missing."""
    digest = hashlib.sha256()
    try:
        for chunk in store.read(key):
            digest.update(chunk)
            report(len(chunk))
    except ObjectNotFoundError:
        return None
    return digest.hexdigest()


def _stored(store: ObjectStore, digest: str) -> StoredModel:
    content = read_small_object(store, manifest_key(digest), MAX_MANIFEST_BYTES)
    if content is None:
        problem = f"it has no {MANIFEST_NAME}; push it, or finish its push, with `cloister models push`"
        return StoredModel(digest=digest, problem=problem)
    try:
        return StoredModel(digest=digest, manifest=ModelManifest.from_json(content, digest))
    except ManifestError as error:
        problem = f"{error}; push it again, or delete it with `cloister models rm {digest}`"
        return StoredModel(digest=digest, problem=problem)
