"""What the Pulumi program, which renders one RayJob template for each model, and the launcher agree on.

A template is a complete RayJob in JSON. The launcher sets its name, two labels and the job spec, and nothing else.
"""

import dataclasses
import hashlib
import json
import re
from typing import Final

from ray_job.contract.job_spec import ModelSpec

GROUP: Final = "ray.io"
VERSION: Final = "v1"
PLURAL: Final = "rayjobs"

BATCH_LABEL: Final = "cloister.dev/batch"
ATTEMPT_LABEL: Final = "cloister.dev/attempt"
MODEL_ANNOTATION: Final = "cloister.dev/model"
FINGERPRINT_ANNOTATION: Final = "cloister.dev/model-fingerprint"
STUCK_LIMIT_ANNOTATION: Final = "cloister.dev/stuck-limit-s"
"""For how many seconds a pod of the job may be stuck before the batch is given up."""
NODE_LIMIT_ANNOTATION: Final = "cloister.dev/node-limit-s"
"""On a pod: for how many seconds its pool may be without a node; not there where nodes are made on demand."""

HOSTS_ANNOTATION: Final = "cloister.dev/hosts-per-engine"
"""On a GPU pod: how many pods one engine spreads over; not there where it is one."""

# KubeRay makes names of pods and services from it and refuses a longer one.
MAX_NAME_LENGTH: Final = 47
_NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


class RayJobNameError(ValueError):
    """A job id that cannot be a RayJob's name."""


def rayjob_name(job_id: str) -> str:
    """The name of a job's RayJob: ``batch_0f3c…-1`` → ``batch-0f3c…-1``.

    The name is the job's identity: the API server takes it once.

    Raises:
        RayJobNameError: the id is too long or has other characters than lower case letters, digits, ``_`` and ``-``.
    """
    name = job_id.replace("_", "-")
    if len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
        raise RayJobNameError(
            f"the job id {job_id!r} cannot be a RayJob's name: at most {MAX_NAME_LENGTH} lower case letters, digits, "
            "'_' and '-', with a letter first"
        )
    return name


def template_key(model_id: str) -> str:
    """The file name of a model's template, and so a key of a ConfigMap: ``llama-3.1-8b-1f0c3a5b7d.json``.

    A model's id may have any characters; the digest keeps two ids apart that look the same without them.
    """
    plain = re.sub(r"[^a-z0-9.]+", "-", model_id.lower()).strip("-.")[:60]
    digest = hashlib.sha256(model_id.encode()).hexdigest()[:10]
    return f"{plain}-{digest}.json" if plain else f"{digest}.json"


def model_fingerprint(model: ModelSpec) -> str:
    """Changes with everything in a model's spec. A template is good for the model that it was rendered for only."""
    fields = json.dumps(dataclasses.asdict(model), sort_keys=True, default=str)
    return hashlib.sha256(fields.encode()).hexdigest()[:32]
