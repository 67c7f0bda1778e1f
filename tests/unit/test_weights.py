"""Copying a model's directory from the object store."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_job.contract.job_spec import ObjectStoreLocation
from ray_job.contract.weights import WeightsCopy
from ray_job.errors import EngineUnavailableError, NoModelError
from ray_job.weights import copy_model, loaded_files, prepare, require_model

GIB = 2**30


def copy(tmp_path: Path, **changed: Any) -> WeightsCopy:
    copy = WeightsCopy(
        object_store=ObjectStoreLocation(kind="directory", root=str(tmp_path / "store")),
        prefix="models/demo/",
        directory=str(tmp_path / "models/demo"),
        whole=True,
        volume_gib=1,
        engine_volume_gib=1,
        load_format="auto",
    )
    return dataclasses.replace(copy, **changed)


def grow(path: Path, size_bytes: int) -> None:
    """Create a sparse file of a size."""
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.truncate(path, size_bytes)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    store = tmp_path / "store/models/demo"
    (store / "tokenizer").mkdir(parents=True)
    (store / "config.json").write_text("{}")
    (store / "model-00001.safetensors").write_bytes(b"w" * 1000)
    (store / "tokenizer/vocab.json").write_text("[]")
    (tmp_path / "store/models/demo-2").mkdir()
    (tmp_path / "store/models/demo-2/config.json").write_text("other")
    return tmp_path / "models/demo"


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_whole_directory_is_copied_and_no_other(target: Path, tmp_path: Path) -> None:
    assert copy_model(copy(tmp_path)) == 1004
    assert files(target) == {"config.json", "model-00001.safetensors", "tokenizer/vocab.json"}


def test_copy_without_weights_holds_the_tokenizer(target: Path, tmp_path: Path) -> None:
    copy_model(copy(tmp_path, whole=False))
    assert files(target) == {"config.json", "tokenizer/vocab.json"}


def test_only_complete_files_are_left_alone(target: Path, tmp_path: Path) -> None:
    (target / "tokenizer").mkdir(parents=True)
    (target / "tokenizer/vocab.json").write_text("??")
    (target / "model-00001.safetensors").write_bytes(b"w" * 10)
    copy_model(copy(tmp_path))
    assert (target / "tokenizer/vocab.json").read_text() == "??"
    assert (target / "model-00001.safetensors").stat().st_size == 1000


def test_prefix_without_a_model_is_reported(target: Path, tmp_path: Path) -> None:
    with pytest.raises(NoModelError, match=r"holds no config\.json: upload the model's whole directory"):
        copy_model(copy(tmp_path, prefix="models/nothing/"))
    assert not target.exists()


@pytest.mark.parametrize(
    ("others", "left_out"),
    [
        (["pytorch_model-00001-of-00002.bin", "tf_model.h5"], True),
        (["original/consolidated.00.pth", "metal/model.bin", "onnx/model.onnx_data"], True),
        (["original/model.safetensors"], True),
        (["original/params.json", "sparse_linear.pt", "2_Dense/pytorch_model.bin", "2_Dense/config.json"], False),
        (["consolidated.safetensors", "vae/diffusion.safetensors"], False),
    ],
)
def test_second_formats_of_the_weights_are_left_out(others: list[str], left_out: bool) -> None:
    model = {"config.json", "model.safetensors", "tokenizer.json"}
    assert loaded_files({*model, *others}) == (model if left_out else {*model, *others})


def test_model_without_safetensors_keeps_all_weights() -> None:
    model = {"config.json", "pytorch_model.bin", "original/consolidated.00.pth", "onnx/model.onnx"}
    assert loaded_files(model) == model


def test_model_with_a_load_format_keeps_all_weights(target: Path, tmp_path: Path) -> None:
    (tmp_path / "store/models/demo/model.bin").write_text("weights")
    copy_model(copy(tmp_path))
    assert "model.bin" not in files(target)
    copy_model(copy(tmp_path, load_format="npcache"))
    assert "model.bin" in files(target)


@pytest.mark.parametrize("whole", [True, False])
def test_weights_larger_than_the_engines_volume_end_the_job_before_the_copy(
    target: Path, tmp_path: Path, whole: bool
) -> None:
    grow(tmp_path / "store/models/demo/model-00002.safetensors", 19 * GIB)
    output = prepare(copy(tmp_path, whole=whole, volume_gib=18 if whole else 1, engine_volume_gib=18))
    assert output.endswith(
        "models/demo/ in the object store takes 19.00 GiB, and the volume for it holds 18 GiB: raise the model's "
        "weights_gib (model_weights.cache_gib where it has none) or delete what is not of the model"
    )
    assert files(target) == {"no-model.txt"}
    with pytest.raises(NoModelError, match=r"takes 19\.00 GiB"):
        require_model(str(target))


def test_volume_must_hold_whole_blocks(target: Path, tmp_path: Path) -> None:
    grow(tmp_path / "store/models/demo/model-00002.safetensors", GIB - 1004)
    with pytest.raises(NoModelError, match=r"takes 1\.00 GiB, and the volume for it holds 1 GiB"):
        copy_model(copy(tmp_path))
    assert not target.exists()


def test_files_that_the_engine_does_not_load_take_no_room(target: Path, tmp_path: Path) -> None:
    grow(tmp_path / "store/models/demo/original/consolidated.00.pth", 19 * GIB)
    prepare(copy(tmp_path))
    require_model(str(target))


def test_tokenizer_larger_than_its_volume_ends_the_job(target: Path, tmp_path: Path) -> None:
    grow(tmp_path / "store/models/demo/tokenizer/extra.tar", 2 * GIB)
    prepare(copy(tmp_path, whole=False, engine_volume_gib=18))
    with pytest.raises(NoModelError, match=r"what is not weights of .* takes 2\.00 GiB, and .* holds 1 GiB"):
        require_model(str(target))


def test_failed_copy_is_retried_and_continues(target: Path, tmp_path: Path) -> None:
    target.mkdir(parents=True)
    (target / "tokenizer").write_text("in the way of a directory")

    def pauses_s() -> Iterator[float]:
        yield 0
        (target / "tokenizer").unlink()
        yield 0

    assert prepare(copy(tmp_path), pauses_s()) == "copied 0.0 GiB"
    assert files(target) == {"config.json", "model-00001.safetensors", "tokenizer/vocab.json"}


def test_failed_copy_ends_this_attempt_only(target: Path, tmp_path: Path) -> None:
    target.mkdir(parents=True)
    (target / "tokenizer").write_text("in the way of a directory")
    prepare(copy(tmp_path), [0.0])
    assert files(target) == {"model-not-copied.txt"}
    with pytest.raises(
        EngineUnavailableError, match=r"could not be copied to .*File exists.*; see that the object"
    ) as caught:
        require_model(str(target))
    assert not isinstance(caught.value, NoModelError)
    prepare(copy(tmp_path))
    require_model(str(target))


def run(value: str) -> tuple[int, str]:
    finished = subprocess.run(
        [sys.executable, "-m", "ray_job.weights"], env={"CLOISTER_WEIGHTS": value}, capture_output=True, check=False
    )
    return finished.returncode, (finished.stdout + finished.stderr).decode()


def test_program_reports_an_error_in_one_line() -> None:
    status, output = run("{}")
    assert (status, output.count("\n")) == (1, 1)
    assert "cannot read CLOISTER_WEIGHTS" in output


def test_missing_model_ends_the_job_and_not_the_pod(target: Path, tmp_path: Path) -> None:
    status, output = run(json.dumps(dataclasses.asdict(copy(tmp_path, prefix="nothing/"))))
    assert (status, output.count("\n")) == (0, 1)
    with pytest.raises(NoModelError, match=r"nothing/ in the object store holds no config\.json: upload the model"):
        require_model(str(target))


def test_copied_model_is_accepted(target: Path, tmp_path: Path) -> None:
    assert run(json.dumps(dataclasses.asdict(copy(tmp_path)))) == (0, "copied 0.0 GiB\n")
    require_model(str(target))
