"""Copying a model's directory from the object store."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ray_job.contract.job_spec import ObjectStoreLocation
from ray_job.contract.weights import WeightsCopy, WeightsError
from ray_job.errors import EngineStartError
from ray_job.weights import copy_model, require_model


def copy(tmp_path: Path, *, whole: bool = True, prefix: str = "models/demo/") -> WeightsCopy:
    store = ObjectStoreLocation(kind="directory", root=str(tmp_path / "store"))
    return WeightsCopy(object_store=store, prefix=prefix, directory=str(tmp_path / "models/demo"), whole=whole)


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


def test_the_whole_directory_is_copied_and_no_other(target: Path, tmp_path: Path) -> None:
    assert copy_model(copy(tmp_path)) == 1004
    assert files(target) == {"config.json", "model-00001.safetensors", "tokenizer/vocab.json"}


def test_who_only_tokenizes_gets_no_weights(target: Path, tmp_path: Path) -> None:
    copy_model(copy(tmp_path, whole=False))
    assert files(target) == {"config.json", "tokenizer/vocab.json"}


def test_a_file_that_is_there_in_full_is_left_alone_and_half_a_file_is_not(target: Path, tmp_path: Path) -> None:
    (target / "tokenizer").mkdir(parents=True)
    (target / "tokenizer/vocab.json").write_text("??")
    (target / "model-00001.safetensors").write_bytes(b"w" * 10)
    copy_model(copy(tmp_path))
    assert (target / "tokenizer/vocab.json").read_text() == "??"
    assert (target / "model-00001.safetensors").stat().st_size == 1000


def test_a_prefix_without_a_model_is_told(target: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"holds no config\.json: upload the model's whole directory"):
        copy_model(copy(tmp_path, prefix="models/nothing/"))
    assert not target.exists()


def run(value: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "ray_job.weights"], env={"CLOISTER_WEIGHTS": value}, capture_output=True, check=False
    )
    return ended.returncode, (ended.stdout + ended.stderr).decode()


def test_the_program_tells_what_is_wrong_in_one_line() -> None:
    status, told = run("{}")
    assert (status, told.count("\n")) == (1, 1)
    assert "cannot read CLOISTER_WEIGHTS" in told


def test_a_missing_model_ends_the_job_with_where_to_upload_it_and_not_the_pod(target: Path, tmp_path: Path) -> None:
    status, told = run(json.dumps(dataclasses.asdict(copy(tmp_path, prefix="nothing/"))))
    assert (status, told.count("\n")) == (0, 1)
    with pytest.raises(EngineStartError, match=r"nothing/ in the object store holds no config\.json: upload the model"):
        require_model(str(target))


def test_a_model_that_was_copied_is_taken(target: Path, tmp_path: Path) -> None:
    assert run(json.dumps(dataclasses.asdict(copy(tmp_path)))) == (0, "copied 0.0 GiB\n")
    require_model(str(target))
