"""Description of a model's directory, and directories that cannot be pushed."""

import json
import os
from pathlib import Path

import pytest

from ray_job.contract.accelerators import ACCELERATORS
from ray_job.contract.model_fit import misfit
from ray_job.contract.model_manifest import ManifestError, ModelFile, ModelManifest
from service import model_directory as module
from service.model_directory import ModelDirectoryError, describe, find_files
from tests.model_directories import model_directory


def manifest(directory: Path) -> ModelManifest:
    return describe(find_files(directory), name="tiny", spdx="Apache-2.0")


def test_manifest_describes_the_model(tmp_path: Path) -> None:
    found = manifest(model_directory(tmp_path / "tiny"))
    assert (found.architecture, found.dtype, found.quantization) == ("LlamaForCausalLM", "float16", "")
    assert (found.tokenizer_class, found.chat_template) == ("LlamaTokenizerFast", "tokenizer_config.json")
    assert (found.parameters, found.weights_bytes) == (100, (tmp_path / "tiny/model.safetensors").stat().st_size)
    assert found.accelerators == tuple(ACCELERATORS)
    assert [file.path for file in found.files] == ["config.json", "model.safetensors", "tokenizer_config.json"]
    assert found.total_bytes == sum(path.stat().st_size for path in (tmp_path / "tiny").iterdir())


def test_manifest_is_canonical_and_its_digest_pins_every_byte(tmp_path: Path) -> None:
    first, second = (manifest(model_directory(tmp_path / name)) for name in ("a", "b"))
    assert first.to_json() == second.to_json()
    assert ModelManifest.from_json(first.to_json(), first.digest) == first
    (tmp_path / "b/tokenizer_config.json").write_text("{}")
    assert manifest(tmp_path / "b").digest != first.digest
    with pytest.raises(ManifestError, match="has the digest sha256:"):
        ModelManifest.from_json(first.to_json() + b" ", first.digest)


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a//b", ".x", "a/.b", "a\nb", ""])
def test_manifest_cannot_name_a_file_outside_of_the_model(path: str) -> None:
    with pytest.raises(ManifestError, match="is invalid"):
        ModelFile(path=path, size_bytes=1, sha256="0" * 64)


def test_only_shards_of_the_index_are_weights(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "tiny")
    (directory / "consolidated.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    assert manifest(directory).parameters == 200
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"layers": "model.safetensors", "norm": "model.safetensors"}}))
    assert manifest(directory).parameters == 100
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelDirectoryError, match=r"names model\.safetensors, which is missing"):
        manifest(directory)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "a/weights.PT", "x.pkl"])
def test_pickled_file_is_refused_unless_it_is_acknowledged(tmp_path: Path, name: str) -> None:
    directory = model_directory(tmp_path / "tiny")
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_bytes(b"x")
    with pytest.raises(ModelDirectoryError, match=r"may be pickled.*--allow-pickle"):
        find_files(directory)
    assert name in find_files(directory, allow_pickle=True)


@pytest.mark.parametrize("name", ["passwd", "linked"])
def test_link_out_of_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    directory = model_directory(tmp_path / "tiny")
    (tmp_path / "linked").mkdir()
    (directory / name).symlink_to("/etc/passwd" if name == "passwd" else tmp_path / "linked")
    with pytest.raises(ModelDirectoryError, match="is a symbolic link out of the directory"):
        find_files(directory)


def test_link_within_the_directory_is_followed(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "tiny")
    (directory / "generation_config.json").symlink_to("config.json")
    assert find_files(directory)["generation_config.json"] == directory / "config.json"


def test_names_with_a_dot_in_front_are_left_out(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "tiny")
    (directory / ".git").mkdir()
    (directory / ".git/config").touch()
    (directory / ".gitattributes").touch()
    assert len(find_files(directory)) == 3


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: (path / "config.json").unlink(), "has no config.json"),
        (lambda path: (path / "manifest.json").touch(), "has the name of the manifest"),
        (lambda path: (path / "a\tb").touch(), "has a name that no object can have"),
        (lambda path: os.mkfifo(path / "pipe"), "is no regular file"),
        (lambda path: os.truncate(path / "model.safetensors", 100), "is no complete safetensors file"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 100), "is no complete safetensors file"),
        (lambda path: (path / "config.json").write_text("["), "is not JSON"),
        (lambda path: os.truncate(path / "model.safetensors", module.MAX_FILE_BYTES + 1), "is larger than 150 GiB"),
    ],
)
def test_directory_that_is_no_model_is_refused(tmp_path: Path, make: object, problem: str) -> None:
    directory = model_directory(tmp_path / "tiny")
    make(directory)  # type: ignore[operator]
    with pytest.raises(ModelDirectoryError, match=problem):
        manifest(directory)


def test_directory_with_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILES", 2)
    with pytest.raises(ModelDirectoryError, match="has 3 files, and a model may have 2"):
        find_files(model_directory(tmp_path / "tiny"))


@pytest.mark.parametrize(
    ("accelerator", "weights_gib", "dtype", "quantization", "reason"),
    [
        ("a10g", 15, "bfloat16", "", ""),
        ("a10g", 17, "bfloat16", "", "17.0 GiB of weights need 21.2 GiB; an engine gets 20.2 of the 22.5 GiB of a10g"),
        ("v100", 6, "bfloat16", "", "bfloat16 needs compute capability 8.0; v100 has 7.0"),
        ("v100", 6, "float16", "fp8", "fp8 needs compute capability 7.5; v100 has 7.0"),
        ("cpu", 500, "bfloat16", "", ""),
        ("cpu", 1, "", "awq", "awq weights need a GPU"),
    ],
)
def test_fit_of_a_model(accelerator: str, weights_gib: float, dtype: str, quantization: str, reason: str) -> None:
    row = ACCELERATORS[accelerator]
    assert misfit(row, weights_gib=weights_gib, dtype=dtype, quantization=quantization) == reason


def test_engine_argument_replaces_the_stored_data_type() -> None:
    arguments = {"dtype": "float16"}
    assert misfit(ACCELERATORS["v100"], weights_gib=6, dtype="bfloat16", engine_args=arguments) == ""
