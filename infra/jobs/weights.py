"""Sources of model weights, and how a pod of a job gets them; never from a hub. Pure."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from infra.capacity.job_sizes import GroupSize
from infra.kubernetes.pod_spec import NO_GPU, container_security_context, resources, secret_volume
from infra.stack_file.sections import ImageWeightsSection, ModelWeightsSection, VolumeWeightsSection
from infra.tenancy import credentials
from ray_job.contract.job_spec import ObjectStoreLocation
from ray_job.contract.weights import MODELS_DIRECTORY, WEIGHTS_VARIABLE, WeightsCopy
from service.model_catalogue import CatalogueModel

_VOLUME: Final = "weights"
_KEY_DIRECTORY: Final = "/run/cloister/weights-credentials"
# A directory also holds a tokenizer and configuration.
_ROOM: Final = 1.1
# Usage of a copy from a fast network.
_COPY_CPU_M: Final = 1_000
_COPY_MIB: Final = 2_048


@dataclass(frozen=True, slots=True, kw_only=True)
class PodWeights:
    """Fields of a pod template that give the pod a model's directory.

    ``disk_gib`` is the disk of the node that the directory needs.
    """

    volumes: tuple[dict[str, Any], ...] = ()
    mounts: tuple[dict[str, Any], ...] = ()
    init_containers: tuple[dict[str, Any], ...] = ()
    disk_gib: int = 0


def pod_weights(
    weights: ModelWeightsSection,
    store: ObjectStoreLocation,
    model: CatalogueModel,
    image: str,
    size: GroupSize,
    *,
    whole: bool,
) -> PodWeights:
    """Return the fields that give a pod a model's directory.

    Args:
        weights: source of the directory.
        store: the stack's object store. With the prefix ``models``, the source ``/models/a`` is ``models/a/`` in it.
        model: the model.
        image: image of the pod, which contains the program that copies.
        size: size of the pod; the copy must not exceed it.
        whole: include the weights themselves; a pod without them only renders and tokenizes prompts.
    """
    if model.spec.engine == "http" or isinstance(weights, ImageWeightsSection):
        return PodWeights()
    mounts = ({"name": _VOLUME, "mountPath": MODELS_DIRECTORY, "readOnly": True},)
    if isinstance(weights, VolumeWeightsSection):
        claim = {"claimName": weights.claim, "readOnly": True}
        return PodWeights(volumes=({"name": _VOLUME, "persistentVolumeClaim": claim},), mounts=mounts)
    if not whole and model.spec.engine == "direct":
        return PodWeights()  # only the engine's server uses the model
    engine_gib = math.ceil(model.weights_gib * _ROOM + 1) if model.weights_gib else weights.cache_gib
    volume_gib = engine_gib if whole else 1
    below = PurePosixPath(model.spec.source).relative_to(MODELS_DIRECTORY)
    copy = WeightsCopy(
        object_store=store,
        prefix=f"{weights.prefix.strip('/')}/{below}/",
        directory=model.spec.source,
        whole=whole,
        volume_gib=volume_gib,
        engine_volume_gib=engine_gib,
        load_format=str(model.spec.engine_args.get("load_format", "auto")),
        digest=model.spec.digest,
    )
    return PodWeights(
        volumes=(
            {"name": _VOLUME, "emptyDir": {"sizeLimit": f"{volume_gib}Gi"}},
            secret_volume(credentials.WEIGHTS_LOGIN, secret=credentials.WEIGHTS_LOGIN),
        ),
        mounts=mounts,
        init_containers=(_copy_container(copy, image, size),),
        disk_gib=volume_gib,
    )


def _copy_container(copy: WeightsCopy, image: str, size: GroupSize) -> dict[str, Any]:
    """Return the init container that copies a model's directory. It alone mounts the key; it ends before Ray starts."""
    environment = {
        **NO_GPU,
        WEIGHTS_VARIABLE: json.dumps(dataclasses.asdict(copy), sort_keys=True),
        "TMPDIR": "/tmp",  # noqa: S108 - a volume of the pod
        "AWS_SHARED_CREDENTIALS_FILE": f"{_KEY_DIRECTORY}/aws",
        "AWS_EC2_METADATA_DISABLED": "true",
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
            {"name": _VOLUME, "mountPath": MODELS_DIRECTORY},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            {"name": credentials.WEIGHTS_LOGIN, "mountPath": _KEY_DIRECTORY, "readOnly": True},
        ],
    }
