"""Pushed models in all object stores."""

from pathlib import Path

import pytest

from ray_job.contract.model_manifest import ModelManifest
from ray_job.contract.object_keys import manifest_key, model_prefix
from service.errors import ObjectStoreError
from service.model_directory import ModelDirectoryError, describe, find_files
from service.model_registry import RegistryError, find_model, list_models, push, read_manifest, remove, verify
from service.ports import ObjectStore
from tests.model_directories import model_directory


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return find_files(model_directory(tmp_path / "tiny"))


@pytest.fixture
def manifest(files: dict[str, Path]) -> ModelManifest:
    return describe(files, name="tiny")


def test_pushed_model_is_found_and_unchanged(
    store: ObjectStore, files: dict[str, Path], manifest: ModelManifest
) -> None:
    assert push(store, manifest, files) == 3
    assert find_model(store, "tiny") == find_model(store, manifest.digest)
    assert read_manifest(store, manifest.digest) == manifest
    assert list(verify(store, manifest)) == []


def test_interrupted_push_continues(store: ObjectStore, files: dict[str, Path], manifest: ModelManifest) -> None:
    push(store, manifest, files)
    store.delete(manifest_key(manifest.digest))
    store.delete(f"{model_prefix(manifest.digest)}config.json")
    (unfinished,) = list_models(store)
    assert unfinished.manifest is None
    with pytest.raises(RegistryError, match="finish its push"):
        read_manifest(store, manifest.digest)
    done: list[int] = []
    assert push(store, manifest, files, report=done.append) == 1
    assert sum(done) == manifest.total_bytes
    assert list(verify(store, manifest)) == []


def test_file_that_changes_during_the_push_is_not_stored(
    store: ObjectStore, files: dict[str, Path], manifest: ModelManifest
) -> None:
    files["config.json"].write_text("{}")
    with pytest.raises(ModelDirectoryError, match=r"config\.json changed during the push"):
        push(store, manifest, files)
    keys = list(store.keys(model_prefix(manifest.digest)))
    assert not {manifest_key(manifest.digest), f"{model_prefix(manifest.digest)}config.json"} & set(keys)


def test_changes_in_the_store_are_found(store: ObjectStore, files: dict[str, Path], manifest: ModelManifest) -> None:
    push(store, manifest, files)
    prefix = model_prefix(manifest.digest)
    store.put(f"{prefix}model.safetensors", [files["model.safetensors"].read_bytes()[:-1] + b"\1"])
    store.delete(f"{prefix}config.json")
    store.put(f"{prefix}extra.bin", [b"x"])
    missing, changed, added = verify(store, manifest)
    assert (missing, added) == ("config.json is missing", "extra.bin is not in the manifest")
    assert changed.startswith("model.safetensors has the SHA-256 ")
    store.delete(f"{prefix}extra.bin")
    assert push(store, manifest, files) == 2
    assert list(verify(store, manifest)) == []
    store.put(manifest_key(manifest.digest), [manifest.to_json().replace(b"float16", b"float32")])
    (listed,) = list_models(store)
    assert "has the digest sha256:" in listed.problem


def test_name_of_several_models_is_refused(store: ObjectStore, files: dict[str, Path], manifest: ModelManifest) -> None:
    push(store, manifest, files)
    files["config.json"].write_text("{}")
    push(store, describe(files, name="tiny"), files)
    with pytest.raises(RegistryError, match="2 models have the name 'tiny': give one of the digests sha256:"):
        find_model(store, "tiny")


def test_removed_model_is_gone_and_copied_directories_stay(
    store: ObjectStore, files: dict[str, Path], manifest: ModelManifest
) -> None:
    store.put("models/llama/config.json", [b"{}"])
    push(store, manifest, files)
    assert remove(store, manifest.digest) == 4
    assert list(store.keys("models/")) == ["models/llama/config.json"]
    assert list_models(store) == []
    with pytest.raises(RegistryError, match="has no model"):
        find_model(store, manifest.digest)


def test_failed_upload_is_reported(tmp_path: Path, files: dict[str, Path], manifest: ModelManifest) -> None:
    from service.adapters.directory_object_store import DirectoryObjectStore

    (tmp_path / "objects").mkdir()
    (tmp_path / "objects/models").write_text("in the way")
    with pytest.raises(ObjectStoreError, match="cannot write the object"):
        push(DirectoryObjectStore(tmp_path / "objects"), manifest, files)
