"""Weights that someone changed after the operator pinned them."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ray_job.contract.job_spec import ModelSpec, ObjectStoreLocation
from ray_job.contract.model_manifest import ModelManifest
from ray_job.contract.object_keys import manifest_key, model_prefix
from ray_job.contract.weights import WeightsCopy
from ray_job.engines.direct import DirectEngine
from ray_job.errors import NoModelError
from ray_job.weights import copy_model, require_model, verify_model
from service.adapters.directory_object_store import DirectoryObjectStore
from service.model_directory import describe, find_files
from service.model_registry import push
from tests.model_directories import model_directory


@pytest.fixture
def manifest(tmp_path: Path) -> ModelManifest:
    """A model that was pushed to a directory store."""
    files = find_files(model_directory(tmp_path / "tiny"))
    manifest = describe(files, name="tiny")
    push(DirectoryObjectStore(tmp_path / "objects"), manifest, files)
    return manifest


def stored(tmp_path: Path, manifest: ModelManifest) -> Path:
    return tmp_path / "objects" / model_prefix(manifest.digest)


def tamper(file: Path) -> None:
    """Flip one bit of the last byte, which leaves the size and the header of the file as they are."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def copy(tmp_path: Path, manifest: ModelManifest, **changed: Any) -> WeightsCopy:
    return dataclasses.replace(
        WeightsCopy(
            object_store=ObjectStoreLocation(kind="directory", root=str(tmp_path / "objects")),
            prefix=model_prefix(manifest.digest),
            directory=str(tmp_path / "models/tiny"),
            whole=True,
            volume_gib=1,
            engine_volume_gib=1,
            load_format="auto",
            digest=manifest.digest,
        ),
        **changed,
    )


def run(weights: WeightsCopy) -> str:
    """Run the init container of a job's pod."""
    environment = {"CLOISTER_WEIGHTS": json.dumps(dataclasses.asdict(weights)), "PYTHONPATH": os.getcwd()}  # noqa: PTH109
    command = [sys.executable, "-m", "ray_job.weights"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_unchanged_model_is_copied(tmp_path: Path, manifest: ModelManifest) -> None:
    (stored(tmp_path, manifest) / "added.py").write_text("not of the model")
    assert run(copy(tmp_path, manifest)) == "copied 0.0 GiB\n"
    copied = {path.name: path.read_bytes() for path in (tmp_path / "models/tiny").iterdir()}
    assert copied == {path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir()}


def test_one_tampered_byte_of_the_weights_ends_the_job_before_the_engine_starts(
    tmp_path: Path, manifest: ModelManifest
) -> None:
    tamper(stored(tmp_path, manifest) / "model.safetensors")
    output = run(copy(tmp_path, manifest))
    assert output.startswith(f"model.safetensors of the model {manifest.digest} has the SHA-256 ")
    assert [path.name for path in (tmp_path / "models/tiny").iterdir()] == ["no-model.txt"]
    with pytest.raises(NoModelError, match=r"changed or damaged in the object store\. Run `cloister models verify`"):
        require_model(str(tmp_path / "models/tiny"))


def test_tampered_tokenizer_is_found_in_a_pod_without_weights(tmp_path: Path, manifest: ModelManifest) -> None:
    tamper(stored(tmp_path, manifest) / "tokenizer_config.json")
    with pytest.raises(NoModelError, match=r"tokenizer_config\.json of the model"):
        copy_model(copy(tmp_path, manifest, whole=False))


def test_tampered_file_of_an_earlier_copy_is_replaced(tmp_path: Path, manifest: ModelManifest) -> None:
    copy_model(copy(tmp_path, manifest))
    tamper(tmp_path / "models/tiny/model.safetensors")
    copy_model(copy(tmp_path, manifest))
    assert (tmp_path / "models/tiny/model.safetensors").read_bytes() == (
        tmp_path / "tiny/model.safetensors"
    ).read_bytes()


def test_manifest_that_fits_tampered_weights_has_another_digest(tmp_path: Path, manifest: ModelManifest) -> None:
    tamper(tmp_path / "tiny/model.safetensors")
    files = find_files(tmp_path / "tiny")
    forged = describe(files, name="tiny")
    store = DirectoryObjectStore(tmp_path / "objects")
    store.put(manifest_key(manifest.digest), [forged.to_json()])
    store.put(f"{model_prefix(manifest.digest)}model.safetensors", [files["model.safetensors"].read_bytes()])
    with pytest.raises(NoModelError, match=f"of the model {manifest.digest} has the digest {forged.digest}"):
        copy_model(copy(tmp_path, manifest))


def test_missing_manifest_ends_the_job(tmp_path: Path, manifest: ModelManifest) -> None:
    DirectoryObjectStore(tmp_path / "objects").delete(manifest_key(manifest.digest))
    with pytest.raises(NoModelError, match=r"holds no manifest\.json: push the model"):
        copy_model(copy(tmp_path, manifest))


def test_engine_that_reads_a_model_in_place_checks_it_before_it_starts(tmp_path: Path, manifest: ModelManifest) -> None:
    model = ModelSpec(id="tiny", source=str(stored(tmp_path, manifest)), digest=manifest.digest)
    verify_model(model)
    tamper(stored(tmp_path, manifest) / "model.safetensors")
    with pytest.raises(NoModelError, match=r"model\.safetensors of the model"):
        asyncio.run(DirectEngine(model).start())
    (stored(tmp_path, manifest) / "model.safetensors").unlink()
    with pytest.raises(NoModelError, match=r"cannot be read in .*: No such file or directory"):
        verify_model(model)


def test_file_that_was_added_to_a_model_is_not_loaded_in_place(tmp_path: Path, manifest: ModelManifest) -> None:
    (stored(tmp_path, manifest) / "model-00002.safetensors").write_bytes(b"weights of someone else")
    with pytest.raises(NoModelError, match=r"model-00002\.safetensors is not in the manifest of the model"):
        verify_model(ModelSpec(id="tiny", source=str(stored(tmp_path, manifest)), digest=manifest.digest))
