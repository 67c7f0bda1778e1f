"""Accelerators are rows of a table: a new one needs no code."""

import json
from typing import Any

import pytest
import yaml

from infra.rendering.recording import Recording
from ray_job.contract.accelerators import ACCELERATORS, OLDEST_SUPPORTED, variant_for
from service.model_catalogue import parse_catalogue
from tests.infra.previewed_stacks import changed, preview_values, stack_text

EXAMPLE = "v100-and-a10g"
POOL = {"nodes": ["x-1", "x-2"], "gpus_per_node": 4, "cpus": 64, "memory_gib": 500, "max_workers": 4}


def previewed(accelerator: str, **sections: Any) -> Recording:
    """Preview the example with one model, on a pool of another accelerator."""
    example = stack_text(EXAMPLE)
    pools = {name: example.values["node_pools"][name] for name in ("system", "cpu")}
    model = {"id": "m", "source": "/models/m", "accelerator": accelerator, "weights_gib": 5}
    values = changed(EXAMPLE, node_pools=pools | {accelerator: POOL}, models=[model], **sections)
    return preview_values(values, example.secret_keys)


def gpu_workers(recording: Recording) -> dict[str, Any]:
    (config_map,) = [each for each in recording.of_type("ConfigMap") if each.name == "ray-job-templates"]
    (template,) = config_map.inputs["data"].values()
    cluster = json.loads(template)["spec"]["rayClusterSpec"]
    (group,) = [group for group in cluster["workerGroupSpecs"] if group["groupName"] != "cpu"]
    spec: dict[str, Any] = group["template"]["spec"]
    return {
        "group": group["groupName"],
        "ray": cluster["rayVersion"],
        "limits": spec["containers"][0]["resources"]["limits"],
        "selector": spec["nodeSelector"],
        "tolerated": [each["key"] for each in spec["tolerations"]],
    }


def job_quota(recording: Recording) -> dict[str, str]:
    (quota,) = [each for each in recording.of_type("ResourceQuota") if "-jobs-" in each.name]
    hard: dict[str, str] = quota.inputs["spec"]["hard"]
    return hard


@pytest.mark.parametrize("accelerator", ["l40s", "h100"])
def test_pool_of_any_row_works(accelerator: str) -> None:
    recording = previewed(accelerator)
    workers = gpu_workers(recording)
    assert (workers["group"], workers["ray"]) == (accelerator, "2.60.0")
    assert workers["limits"]["nvidia.com/gpu"] == "1"
    assert workers["selector"] == {"cloister.dev/pool": accelerator}
    assert job_quota(recording)["requests.nvidia.com/gpu"] == "8"


def test_row_of_the_stack_file_works_throughout() -> None:
    row = {"memory_mib": 30_000, "compute_capability": "11.3", "resource": "example.com/accelerator"}
    recording = previewed("zx81", accelerators={"zx81": row})
    workers = gpu_workers(recording)
    assert (workers["group"], workers["ray"]) == ("zx81", "2.60.0")
    assert workers["limits"]["example.com/accelerator"] == "1"
    assert workers["tolerated"] == ["example.com/accelerator"]
    assert job_quota(recording)["requests.example.com/accelerator"] == "8"
    nodes = {patch.inputs["metadata"]["name"]: patch.inputs for patch in recording.of_type("NodePatch")}
    assert nodes["x-1"]["metadata"]["labels"] == {"cloister.dev/pool": "zx81"}
    assert nodes["x-1"]["spec"]["taints"][0]["key"] == "example.com/accelerator"
    (models,) = [each for each in recording.of_type("ConfigMap") if each.name == "models"]
    catalogue = parse_catalogue(yaml.safe_load(models.inputs["data"]["models.yaml"]))
    assert catalogue["m"].spec.accelerator == "zx81"


def test_mig_slices_are_requested_by_their_resource() -> None:
    recording = previewed("a100-3g-40gb")
    workers = gpu_workers(recording)
    assert workers["limits"]["nvidia.com/mig-3g.40gb"] == "1"
    assert "nvidia.com/gpu" not in workers["limits"]
    assert workers["tolerated"] == ["nvidia.com/gpu"]
    assert job_quota(recording)["requests.nvidia.com/mig-3g.40gb"] == "8"


def test_rows_name_their_source_and_a_variant_that_runs_on_them() -> None:
    for name, row in ACCELERATORS.items():
        assert row.name == name
        assert row.source
        if row.capability:
            assert row.capability >= OLDEST_SUPPORTED
            assert row.image_variant == variant_for(row.capability)
            assert row.memory_mib > 1024


@pytest.mark.parametrize(
    ("name", "dtypes", "fp8"),
    [
        ("v100", ("float16", "float32"), False),
        ("t4", ("float16", "float32"), True),
        ("a10g", ("float16", "float32", "bfloat16"), True),
        ("cpu", ("float16", "float32", "bfloat16"), True),
    ],
)
def test_formats_follow_from_the_compute_capability(name: str, dtypes: tuple[str, ...], *, fp8: bool) -> None:
    assert ACCELERATORS[name].dtypes == dtypes
    assert ("fp8" in ACCELERATORS[name].quantizations) == fp8
