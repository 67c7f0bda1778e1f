"""Where the weights of the models come from, and how a pod of a batch gets them: never from a hub. Pure."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from infra import credentials
from infra.pod_security import container_security_context, resources, temporary_volume
from infra.ray_job_sizes import PodSize
from ray_job.contract.job_spec import ObjectStoreLocation
from ray_job.contract.weights import WEIGHTS_VARIABLE, WeightsCopy
from service.model_catalogue import CatalogueModel

DIRECTORY: Final = "/models"
"""Where every pod has the models' directories."""
_VOLUME: Final = "weights"
# Beside the weights there are a tokenizer and configuration.
_ROOM: Final = 1.1
# What copying from a fast network uses.
_COPY_CPU_M: Final = 1_000
_COPY_MIB: Final = 2_048


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageWeights:
    """Every model's source is a directory of its lane's image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeWeights:
    """A persistent volume claim in the jobs' namespace, which many nodes can read, mounted at ``/models``."""

    claim: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreWeights:
    """Objects of the stack's store, which each pod copies to its node before it starts.

    Attributes:
        location: the stack's object store.
        prefix: below the stack's own prefix; the source ``/models/a`` is what lies below ``{prefix}/a/``.
        cache_gib: disk for a model whose ``weights_gib`` is not given, in GiB.
    """

    location: ObjectStoreLocation
    prefix: str
    cache_gib: int


Weights = ImageWeights | VolumeWeights | ObjectStoreWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsParts:
    """What a pod gets so that it has a model: parts of its template.

    ``disk_gib`` is disk of the node that the pod needs for it.
    """

    volumes: tuple[dict[str, Any], ...] = ()
    mounts: tuple[dict[str, Any], ...] = ()
    init_containers: tuple[dict[str, Any], ...] = ()
    disk_gib: int = 0


def weights_parts(weights: Weights, model: CatalogueModel, image: str, size: PodSize, *, whole: bool) -> WeightsParts:
    """How a pod gets a model's directory.

    Args:
        weights: where it is.
        model: the model.
        image: the pod's own, which has the program that copies.
        size: of the pod, which copying does not make larger.
        whole: with the weights themselves; without them a pod renders and tokenizes only.
    """
    if model.spec.lane == "http" or isinstance(weights, ImageWeights):
        return WeightsParts()
    mounts = ({"name": _VOLUME, "mountPath": DIRECTORY, "readOnly": True},)
    if isinstance(weights, VolumeWeights):
        claim = {"claimName": weights.claim, "readOnly": True}
        return WeightsParts(volumes=({"name": _VOLUME, "persistentVolumeClaim": claim},), mounts=mounts)
    if not whole and model.spec.lane == "direct":
        return WeightsParts()  # vLLM's own server does all that a model is needed for
    engine_gib = math.ceil(model.weights_gib * _ROOM + 1) if model.weights_gib else weights.cache_gib
    volume_gib = engine_gib if whole else 1
    below = PurePosixPath(model.spec.source).relative_to(DIRECTORY)
    copy = WeightsCopy(
        object_store=weights.location,
        prefix=f"{weights.prefix.strip('/')}/{below}/",
        directory=model.spec.source,
        whole=whole,
        volume_gib=volume_gib,
        engine_volume_gib=engine_gib,
        load_format=str(model.spec.engine_args.get("load_format", "auto")),
    )
    return WeightsParts(
        volumes=(temporary_volume(_VOLUME, size=f"{volume_gib}Gi"),),
        mounts=mounts,
        init_containers=(_copy_container(copy, image, size),),
        disk_gib=volume_gib,
    )


def _copy_container(copy: WeightsCopy, image: str, size: PodSize) -> dict[str, Any]:
    environment = {
        WEIGHTS_VARIABLE: json.dumps(dataclasses.asdict(copy), sort_keys=True),
        "TMPDIR": "/tmp",  # noqa: S108 - a volume of the pod's own
        **credentials.ENVIRONMENT,
    }
    return {
        "name": "weights",
        "image": image,
        "command": ["python", "-m", "ray_job.weights"],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "resources": resources(
            cpu=f"{min(_COPY_CPU_M, size.cpu_m)}m",
            memory=f"{min(_COPY_MIB, size.memory_mib)}Mi",
            ephemeral_storage=f"{copy.volume_gib + 1}Gi",
        ),
        "securityContext": container_security_context(),
        "volumeMounts": [
            {"name": _VOLUME, "mountPath": DIRECTORY},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            credentials.volume_mount(),
        ],
    }
