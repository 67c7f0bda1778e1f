"""Models that the catalogue pins by digest, and templates for models that operators enable at run time."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.jobs.template import ray_job_templates
from infra.stack_file.reading import ConfigError
from infra.stack_file.sections import ObjectStoreWeightsSection
from ray_job.contract.job_spec import ModelSpec
from ray_job.contract.weights import WEIGHTS_VARIABLE, WeightsCopy
from service.adapters.rayjob_templates import load_run_time_templates, with_model
from service.errors import SettingsError
from service.model_catalogue import parse_catalogue_file
from tests.infra.previewed_stacks import changed, parse
from tests.infra.ray_job_args import NAMES, args, model, pods, rayjob

DIGEST = f"sha256:{'5f' * 32}"
DIRECTORY = f"/models/{'5f' * 32}"
WEIGHTS = ObjectStoreWeightsSection(kind="object_store")
STORED = {"kind": "object_store"}


def copies(rendered: Any) -> Iterator[WeightsCopy]:
    """Yield what the init containers of a job copy."""
    for pod in pods(rendered).values():
        for container in pod["spec"].get("initContainers", ()):
            for variable in container["env"]:
                if variable["name"] == WEIGHTS_VARIABLE:
                    yield WeightsCopy.from_json(variable["value"])


def problems(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(changed(**sections))
    return str(caught.value)


def test_pods_copy_a_pinned_model_with_its_digest() -> None:
    pinned = model(source=None, digest=DIGEST, accelerator="a10g", weights_gib=6)
    (copied,) = copies(rayjob(pinned, weights=WEIGHTS))
    assert (copied.digest, copied.prefix, copied.directory) == (DIGEST, f"models/{'5f' * 32}/", DIRECTORY)


def test_template_of_an_accelerator_serves_any_model_that_is_enabled(tmp_path: Path) -> None:
    (files,) = ray_job_templates({}, args(weights=WEIGHTS), at_run_time=("a10g",)).values()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    templates = load_run_time_templates(tmp_path, namespace=NAMES.jobs_namespace)
    assert list(templates) == ["a10g"]
    assert {each.digest for each in copies(templates["a10g"])} == {f"sha256:{'0' * 64}"}
    spec = ModelSpec(id="tiny", source=DIRECTORY, digest=DIGEST, accelerator="a10g")
    completed = with_model(templates["a10g"], spec)
    (copied,) = copies(completed)
    assert (copied.digest, copied.prefix, copied.directory) == (DIGEST, f"models/{'5f' * 32}/", DIRECTORY)
    assert completed["metadata"]["annotations"]["cloister.dev/model"] == "tiny"


def test_invalid_template_of_an_accelerator_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run-time.a10g.json").write_text(json.dumps({"kind": "RayJob"}))
    with pytest.raises(SettingsError, match=r"run-time\.a10g\.json: is not a RayJob of ray\.io/v1; deploy"):
        load_run_time_templates(tmp_path, namespace="jobs")


def test_service_gets_what_the_stack_file_allows() -> None:
    allowed = {"allow": True, "accelerators": ["cpu"]}
    config = parse(changed(models_at_run_time=allowed, model_weights=STORED))
    assert "models_at_run_time:\n  allow: true\n" in config.models_yaml
    read = parse_catalogue_file(yaml.safe_load(config.models_yaml))
    assert read.at_run_time == config.file.models_at_run_time
    assert "models_at_run_time" not in parse(changed()).models_yaml


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"models": [{"id": "a", "digest": DIGEST}]}, "because models[0].digest is set"),
        ({"models_at_run_time": {"allow": True, "accelerators": ["cpu"]}}, "because models_at_run_time.allow is true"),
    ],
)
@pytest.mark.parametrize("weights", [{"kind": "image"}, {"kind": "object_store", "prefix": "weights"}])
def test_pushed_models_need_a_copy_from_their_prefix(
    sections: dict[str, Any], problem: str, weights: dict[str, Any]
) -> None:
    message = problems(model_weights=weights, **sections)
    assert f"must be {{kind: object_store, prefix: models}}, where `cloister models push` stores models, {problem}" in (
        message
    )


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"allow": True}, "models_at_run_time.accelerators: is required with allow: true"),
        ({"accelerators": ["a10x"]}, "models_at_run_time.accelerators[0]: 'a10x' is not a known accelerator"),
        (
            {"allow": True, "accelerators": ["h100"]},
            "models_at_run_time.accelerators[0]: needs a pool with the accelerator h100 below node_pools",
        ),
    ],
)
def test_wrong_section_is_reported(section: dict[str, Any], problem: str) -> None:
    assert problem in problems(model_weights=STORED, models_at_run_time=section)
