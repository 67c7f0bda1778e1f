"""The model catalogue of the command line's options, and the detected accelerator."""

from pathlib import Path

import pytest
import yaml

from ray_job.contract.accelerators import ACCELERATORS, CPU
from service.local.errors import LocalError
from service.local.layout import layout_of
from service.local.models import (
    ModelOptions,
    accelerator_of,
    catalogue,
    read_models,
)
from service.local.stack import make_plan


def test_engine_arguments_keep_their_yaml_types() -> None:
    arguments = ("max-model-len=4096", "enforce_eager=false", "dtype=auto", "--gpu-memory-utilization=0.8")
    options = ModelOptions(source="org/model", engine_args=arguments)
    assert catalogue(options, ACCELERATORS["a10g"])["models"][0]["engine_args"] == {
        "max_model_len": 4096,
        "enforce_eager": False,
        "dtype": "auto",
        "gpu_memory_utilization": 0.8,
    }


def test_engine_argument_without_a_value_is_an_error() -> None:
    with pytest.raises(LocalError, match="is not key=value"):
        catalogue(ModelOptions(source="org/model", engine_args=("enforce_eager",)), CPU)


def test_directory_becomes_an_absolute_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    model = catalogue(ModelOptions(source="tiny"), CPU)["models"][0]
    assert (model["id"], model["source"]) == ("tiny", str(tmp_path / "tiny"))


def test_cpu_gets_float32_by_default() -> None:
    options = ModelOptions(source="org/model", engine_args=("max_model_len=512",))
    model = catalogue(options, CPU)["models"][0]
    assert model["engine_args"] == {"dtype": "float32", "enforce_eager": True, "max_model_len": 512}
    assert catalogue(ModelOptions(source="org/model"), ACCELERATORS["a10g"])["models"][0]["engine_args"] == {}


def test_parallel_sizes_are_settings_of_the_model() -> None:
    options = ModelOptions(source="org/model", engine_args=("tensor_parallel_size=2",))
    model = catalogue(options, ACCELERATORS["a10g"])["models"][0]
    assert model["tensor_parallel_size"] == 2
    assert model["engine_args"] == {}


def test_engines_stay_warm_for_ten_minutes_unless_another_time_is_given() -> None:
    options = (ModelOptions(source="org/model"), ModelOptions(source="org/model", keep_warm_s=0))
    assert [catalogue(each, CPU)["models"][0]["keep_warm_s"] for each in options] == [600, 0]


def test_pooling_model_answers_embeddings() -> None:
    model = catalogue(ModelOptions(source="org/model", engine_args=("runner=pooling",)), CPU)["models"][0]
    assert model["endpoints"] == ["/v1/embeddings"]


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("", "cpu"),
        ("No devices were found\n", "cpu"),
        ("Tesla V100-SXM2-16GB, 16384, 7.0\n", "v100-16gb"),
        ("Tesla V100-SXM2-32GB, 32510, 7.0\n", "v100"),
        ("Tesla T4, 15360, 7.5\n", "t4"),
        ("NVIDIA A10G, 23028, 8.6\nNVIDIA A10G, 23028, 8.6\n", "a10g"),
        ("NVIDIA A10, 23028, 8.6\n", "a10"),
        ("NVIDIA L40S, 46068, 8.9\n", "l40s"),
        ("NVIDIA A100-SXM4-40GB, 40960, 8.0\n", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe, 81920, 8.0\n", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3, 81559, 9.0\n", "h100"),
    ],
)
def test_accelerator_is_found_by_product_and_memory(output: str, name: str) -> None:
    assert accelerator_of(output).name == name


@pytest.mark.parametrize(
    ("output", "capability"),
    [
        ("NVIDIA GeForce RTX 4090, 24564, 8.9\n", (8, 9)),
        ("NVIDIA GeForce RTX 5090, 32607, 12.0\n", (10, 0)),
        ("NVIDIA A30, 24576 MiB, 8.0\n", (8, 0)),
    ],
)
def test_unknown_gpu_gets_the_row_of_the_nearest_older_compute_capability(
    output: str, capability: tuple[int, int]
) -> None:
    assert accelerator_of(output).capability == capability


def test_gpu_without_an_image_is_an_error() -> None:
    with pytest.raises(LocalError, match=r"Tesla P100-PCIE-16GB has compute capability 6.0, and engines need 7.0"):
        accelerator_of("Tesla P100-PCIE-16GB, 16384, 6.0\n")


def test_written_catalogue_is_read_back(tmp_path: Path) -> None:
    content = catalogue(ModelOptions(source="org/model", model_id="m"), CPU)
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(content))
    assert read_models(tmp_path / "models.yaml") == content["models"]


def test_catalogue_without_models_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("models: []")
    with pytest.raises(LocalError, match="names no model"):
        read_models(tmp_path / "models.yaml")


@pytest.mark.parametrize(("source", "offline"), [(".", True), ("org/model", False)])
def test_only_local_models_need_no_download(tmp_path: Path, source: str, offline: bool) -> None:
    endpoint = {"id": "far", "engine": "http", "base_url": "http://127.0.0.1/v1"}
    path = tmp_path / "models.yaml"
    path.write_text(yaml.safe_dump({"models": [endpoint, {"id": "near", "source": source}]}))
    plan = make_plan(layout_of(tmp_path), port=8000, options=ModelOptions(models_file=path), report=print)
    assert plan.offline == offline


def test_jobs_reach_the_coordinator_where_it_listens_and_not_the_database(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(yaml.safe_dump({"models": [{"id": "near", "source": "."}]}))
    plan = make_plan(layout_of(tmp_path), port=8000, options=ModelOptions(models_file=path), report=print)
    settings = plan.service_child("coordinator").environment
    assert settings["CLOISTER_COORDINATOR_URL"] == f"http://127.0.0.1:{settings['CLOISTER_COORDINATOR_PORT']}"
    assert plan.coordinator_port != plan.ray_port
    assert not {"CLOISTER_DATABASE_URL", "PGPASSFILE"} & set(plan.ray_child().environment)
