"""Sections of a stack file as the values that components take. Pure."""

from typing import Any
from urllib.parse import urlsplit

from infra.config_sections import CpuPool, GpuPool, Images, NodePools, ObjectStoreWeights, SystemPool, VolumeWeights
from infra.images import ImageReference
from infra.pools import LANES, POOLS, NodePool, PoolName, RayImage
from infra.weights import ImageWeights, Weights
from infra.weights import ObjectStoreWeights as CopiedWeights
from infra.weights import VolumeWeights as MountedWeights
from ray_job.contract.job_spec import ACCELERATORS, Accelerator, ObjectStoreLocation

_PORTS = {"http": 80, "https": 443}


def node_pools(section: NodePools) -> dict[PoolName, NodePool]:
    """The pools that the stack file names."""
    pools: dict[PoolName, NodePool] = {}
    for name in POOLS:
        pool: SystemPool | CpuPool | GpuPool | None = getattr(section, name)
        if pool is not None:
            fields: dict[str, Any] = pool.model_dump(exclude={"nodes", "max_nodes"})
            nodes, max_nodes = tuple(pool.nodes or ()), pool.max_nodes or 0
            pools[name] = NodePool(name=name, nodes=nodes, max_nodes=max_nodes, **fields)
    return pools


def ray_images(section: Images) -> dict[Accelerator, RayImage]:
    """The images of the lanes that the stack file names, from the mirror if there is one."""
    images: dict[Accelerator, RayImage] = {}
    for accelerator in ACCELERATORS:
        image = getattr(section, f"ray_{accelerator}")
        if image is not None:
            lane = LANES[accelerator]
            reference = str(mirrored(section, image.image))
            images[accelerator] = RayImage(reference=reference, ray=image.ray or lane.ray, vllm=image.vllm or lane.vllm)
    return images


def mirrored(section: Images, image: str) -> ImageReference:
    """An image of the stack file, from the mirror if there is one."""
    return ImageReference.parse(image).mirrored(section.mirror or "")


def model_weights(section: Any, location: ObjectStoreLocation) -> Weights:
    """Where models' directories come from.

    Args:
        section: ``model_weights``.
        location: the stack's object store.
    """
    match section:
        case VolumeWeights():
            return MountedWeights(claim=section.claim)
        case ObjectStoreWeights():
            return CopiedWeights(location=location, prefix=section.prefix, cache_gib=section.cache_gib)
    return ImageWeights()


def url_port(url: str) -> int:
    """The TCP port of a web address."""
    parts = urlsplit(url)
    return parts.port or _PORTS[parts.scheme]
