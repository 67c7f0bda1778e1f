"""What the tests of the Ray job template share: pools, images and models as a stack file would give them."""

from typing import Any

from infra.naming import StackNames
from infra.pools import NodePool, PoolName, lane_image
from infra.ray_job_template import RayJobArgs, ray_job_template
from service.model_catalogue import CatalogueModel, parse_catalogue

NAMES = StackNames(customer="acme", environment="dev")
POOLS: dict[PoolName, NodePool] = {
    "cpu": NodePool(name="cpu", nodes=("cpu-1",), cpus=16, memory_gib=60, max_workers=3),
    "v100": NodePool(
        name="v100",
        nodes=("v-1", "v-2"),
        cpus=32,
        memory_gib=240,
        gpus_per_node=4,
        gpu_memory_gib=16,
        max_workers=4,
    ),
    "a10g": NodePool(
        name="a10g", nodes=("a-1",), cpus=8, memory_gib=32, gpus_per_node=1, gpu_memory_gib=24, max_workers=2
    ),
}


def digest(number: int) -> str:
    return f"registry.example/ray@sha256:{number:064x}"


def args(**changes: Any) -> RayJobArgs:
    images = {accelerator: lane_image(accelerator, digest(n)) for n, accelerator in enumerate(("cpu", "v100", "a10g"))}
    wanted: dict[str, Any] = {"names": NAMES, "images": images, "pools": POOLS}
    return RayJobArgs(**wanted | changes)


def model(**changes: Any) -> CatalogueModel:
    raw = {"id": "demo", "source": "/models/demo", **changes}
    return parse_catalogue({"models": [raw]}).models["demo"]


def rayjob(catalogue_model: CatalogueModel | None = None, **changes: Any) -> dict[str, Any]:
    return ray_job_template(catalogue_model or model(), args(**changes))


def groups(rendered: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {group["groupName"]: group for group in rendered["spec"]["rayClusterSpec"]["workerGroupSpecs"]}


def pods(rendered: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The pod templates, by ``head`` and the groups' names."""
    head = rendered["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    return {"head": head, **{name: group["template"] for name, group in groups(rendered).items()}}
