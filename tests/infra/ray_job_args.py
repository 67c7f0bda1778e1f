"""Pools, images and models for the tests of the RayJob template, as a stack file gives them."""

from dataclasses import replace
from typing import Any

from infra.capacity.pools import GPU_TAINT, IMAGE_VARIANTS, NodePool, RayImage
from infra.jobs.pods import RayJobArgs
from infra.jobs.template import ray_job_template
from infra.kubernetes.naming import StackNames
from infra.stack_file.sections import ImageWeightsSection
from ray_job.contract.accelerators import ACCELERATORS
from ray_job.contract.job_spec import ObjectStoreLocation
from service.model_catalogue import CatalogueModel, parse_catalogue

NAMES = StackNames(customer="acme", environment="dev")
POOLS: dict[str, NodePool] = {
    "cpu": NodePool(name="cpu", nodes=("cpu-1",), cpus=16, memory_gib=60, max_workers=3),
    "v100": NodePool(
        name="v100",
        accelerator=replace(ACCELERATORS["v100-16gb"], name="v100"),
        nodes=("v-1", "v-2"),
        taint=GPU_TAINT,
        cpus=32,
        memory_gib=240,
        gpus_per_node=4,
        max_workers=4,
    ),
    "a10g": NodePool(
        name="a10g",
        accelerator=ACCELERATORS["a10g"],
        nodes=("a-1",),
        taint=GPU_TAINT,
        cpus=8,
        memory_gib=32,
        gpus_per_node=1,
        max_workers=2,
    ),
}


STORE = ObjectStoreLocation(kind="s3", bucket="acme", prefix="acme/dev")


def digest(number: int) -> str:
    return f"registry.example/ray@sha256:{number:064x}"


def args(**changes: Any) -> RayJobArgs:
    images = {
        variant: RayImage(reference=digest(number), ray=versions.ray, vllm=versions.vllm)
        for number, (variant, versions) in enumerate(IMAGE_VARIANTS.items())
    }
    wanted: dict[str, Any] = {
        "names": NAMES,
        "images": images,
        "pools": POOLS,
        "weights": ImageWeightsSection(kind="image"),
        "object_store": STORE,
    }
    return RayJobArgs(**wanted | changes)


def model(**changes: Any) -> CatalogueModel:
    raw = {"id": "demo", "source": "/models/demo", **changes}
    return parse_catalogue({"models": [raw]})["demo"]


def rayjob(catalogue_model: CatalogueModel | None = None, **changes: Any) -> dict[str, Any]:
    return ray_job_template(catalogue_model or model(), args(**changes))


def groups(rendered: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {group["groupName"]: group for group in rendered["spec"]["rayClusterSpec"]["workerGroupSpecs"]}


def pods(rendered: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the pod templates by group; the head's is ``head``."""
    head = rendered["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    return {"head": head, **{name: group["template"] for name, group in groups(rendered).items()}}
