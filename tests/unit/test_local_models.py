"""The model catalogue that the command line's options make."""

from pathlib import Path

import pytest

from service.local.errors import LocalError
from service.local.models import (
    ModelOptions,
    accelerator_of,
    all_local,
    catalogue,
    parse_engine_args,
    read_models,
    write_catalogue,
)


def test_engine_arguments_keep_their_yaml_types() -> None:
    arguments = ["max-model-len=4096", "enforce_eager=false", "dtype=auto", "--gpu-memory-utilization=0.8"]
    assert parse_engine_args(arguments) == {
        "max_model_len": 4096,
        "enforce_eager": False,
        "dtype": "auto",
        "gpu_memory_utilization": 0.8,
    }


def test_an_engine_argument_without_a_value_is_told() -> None:
    with pytest.raises(LocalError, match="is not key=value"):
        parse_engine_args(["enforce_eager"])


def test_a_directory_is_a_source_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    model = catalogue(ModelOptions(source="tiny"), "cpu")["models"][0]
    assert (model["id"], model["source"]) == ("tiny", str(tmp_path / "tiny"))


def test_a_cpu_gets_float32_unless_told_otherwise() -> None:
    options = ModelOptions(source="org/model", engine_args=("max_model_len=512",))
    model = catalogue(options, "cpu")["models"][0]
    assert model["engine_args"] == {"dtype": "float32", "enforce_eager": True, "max_model_len": 512}
    assert catalogue(ModelOptions(source="org/model"), "a10g")["models"][0]["engine_args"] == {}


def test_parallel_sizes_are_settings_of_the_model() -> None:
    options = ModelOptions(source="org/model", engine_args=("tensor_parallel_size=2",))
    model = catalogue(options, "a10g")["models"][0]
    assert model["tensor_parallel_size"] == 2
    assert model["engine_args"] == {}


def test_a_pooling_model_answers_embeddings() -> None:
    model = catalogue(ModelOptions(source="org/model", engine_args=("runner=pooling",)), "cpu")["models"][0]
    assert model["endpoints"] == ["/v1/embeddings"]


@pytest.mark.parametrize(
    ("output", "accelerator"), [("", "cpu"), ("No devices", "cpu"), ("7.0\n", "v100"), ("8.6\n8.6\n", "a10g")]
)
def test_the_compute_capability_names_the_accelerator(output: str, accelerator: str) -> None:
    assert accelerator_of(output) == accelerator


def test_a_written_catalogue_is_read_back(tmp_path: Path) -> None:
    content = catalogue(ModelOptions(source="org/model", model_id="m"), "cpu")
    write_catalogue(tmp_path / "models.yaml", content)
    assert read_models(tmp_path / "models.yaml") == content["models"]


def test_a_catalogue_without_models_is_told(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("models: []")
    with pytest.raises(LocalError, match="names no model"):
        read_models(tmp_path / "models.yaml")


def test_only_models_on_this_machine_need_no_download(tmp_path: Path) -> None:
    assert all_local([{"source": str(tmp_path)}, {"lane": "http", "base_url": "http://127.0.0.1/v1"}])
    assert not all_local([{"source": "org/model"}])
