"""RayJob templates, which are deployed with the model catalogue."""

import json
from pathlib import Path
from typing import Any

import pytest

from ray_job.contract.job_spec import ModelSpec
from ray_job.contract.rayjobs import RayJobNameError, model_fingerprint, rayjob_name, template_key
from service.adapters.rayjob_templates import load_templates
from service.errors import SettingsError
from service.model_catalogue import Catalogue, parse_catalogue

MODEL = {"id": "demo", "source": "/models/demo"}
WITHOUT_TOKEN = {"template": {"spec": {"containers": [{"name": "ray-head"}]}}}


def catalogue(**changes: Any) -> Catalogue:
    return parse_catalogue({"models": [{**MODEL, **changes}]})


def rendered(model: ModelSpec, **changes: Any) -> str:
    annotations = {"cloister.dev/model-fingerprint": model_fingerprint(model)}
    volume = {"name": "job-token", "secret": {"secretName": "set-by-the-launcher"}}
    head = {"template": {"spec": {"containers": [{"name": "ray-head"}], "volumes": [volume]}}}
    template = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"namespace": "jobs", "annotations": annotations},
        "spec": {"rayClusterSpec": {"headGroupSpec": head}},
    }
    return json.dumps({**template, **changes})


def test_each_model_has_its_template(tmp_path: Path) -> None:
    models = catalogue()
    (tmp_path / template_key("demo")).write_text(rendered(models["demo"].spec))
    assert load_templates(tmp_path, models, namespace="jobs")["demo"]["kind"] == "RayJob"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kind": "RayCluster"}, "is not a RayJob of ray.io/v1"),
        ({"metadata": {"namespace": "other"}}, "is for the namespace 'other', not 'jobs'"),
        ({"metadata": {"namespace": "jobs"}}, "was rendered for another version of the model 'demo'"),
        ({"spec": {}}, "has no container for the Ray head"),
        ({"spec": {"rayClusterSpec": {"headGroupSpec": WITHOUT_TOKEN}}}, "has no Secret volume job-token"),
    ],
)
def test_invalid_template_is_refused_with_the_problem(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    models = catalogue()
    (tmp_path / template_key("demo")).write_text(rendered(models["demo"].spec, **changes))
    with pytest.raises(SettingsError, match=problem):
        load_templates(tmp_path, models, namespace="jobs")


def test_template_of_another_version_of_the_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / template_key("demo")).write_text(rendered(catalogue()["demo"].spec))
    with pytest.raises(SettingsError, match="another version of the model"):
        load_templates(tmp_path, catalogue(concurrency=2), namespace="jobs")


def test_all_invalid_templates_are_reported_together(tmp_path: Path) -> None:
    models = parse_catalogue({"models": [MODEL, {**MODEL, "id": "other"}, {**MODEL, "id": "third"}]})
    (tmp_path / template_key("demo")).mkdir()
    (tmp_path / template_key("other")).write_text("{")
    (tmp_path / template_key("third")).write_text("[]")
    with pytest.raises(SettingsError) as caught:
        load_templates(tmp_path, models, namespace="jobs")
    for problem in ("cannot be read: Is a directory", "is not JSON: ", "is not a JSON object"):
        assert problem in str(caught.value)


def test_model_without_a_template_does_not_affect_others(tmp_path: Path) -> None:
    models = parse_catalogue({"models": [MODEL, {**MODEL, "id": "other"}]})
    (tmp_path / template_key("demo")).write_text(rendered(models["demo"].spec))
    assert list(load_templates(tmp_path, models, namespace="jobs")) == ["demo"]


def test_models_that_differ_in_case_or_signs_have_different_templates() -> None:
    assert len({template_key(name) for name in ("Llama 3", "llama-3", "llama/3", "llama_3")}) == 4
    assert template_key("meta/Llama-3.1") == template_key("meta/Llama-3.1")


def test_id_with_a_uuid_makes_a_valid_name() -> None:
    assert len(rayjob_name(f"job_{'f' * 32}")) == 36


@pytest.mark.parametrize("job_id", ["", "1st", "Batch_1", "batch_1-", "b" * 48, "batch.1"])
def test_id_that_kuberay_would_refuse_is_refused(job_id: str) -> None:
    with pytest.raises(RayJobNameError, match="cannot be a RayJob's name"):
        rayjob_name(job_id)
