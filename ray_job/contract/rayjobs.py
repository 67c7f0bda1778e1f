"""Names and rules that the Pulumi program and the launcher share: the program renders a RayJob template for each model.

A template is a complete RayJob in JSON. The launcher sets its name, one label of it and its pods, the job spec and the
Secret with the job's token only. For models that operators enable while the stack runs, there is a template for each
accelerator; the launcher also sets the model in these.
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

JOB_LABEL: Final = "cloister.dev/job"
"""The id of the job: on its RayJob, its Secret, its network policy and its pods, which the network policy selects."""
MODEL_ANNOTATION: Final = "cloister.dev/model"
FINGERPRINT_ANNOTATION: Final = "cloister.dev/model-fingerprint"
STUCK_LIMIT_ANNOTATION: Final = "cloister.dev/stuck-limit-s"
"""Seconds that a pod of the job may be stuck before the job fails."""
NODE_LIMIT_ANNOTATION: Final = "cloister.dev/node-limit-s"
"""On a pod: seconds that its pool may be without a node. Absent if nodes are created on demand."""

HOSTS_ANNOTATION: Final = "cloister.dev/hosts-per-engine"
"""On a GPU pod: number of pods that one engine spreads over. Absent if it is one."""

TOKEN_VOLUME: Final = "job-token"  # noqa: S105 - a name
"""The volume of the head's pod with the job's token. Its Secret has the name of the RayJob."""
TOKEN_KEY: Final = "token"  # noqa: S105 - a name
"""The key of that Secret, and the name of the file."""

# KubeRay derives names of pods and services from it, and refuses a longer one.
MAX_NAME_LENGTH: Final = 47
_NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


class RayJobNameError(ValueError):
    """A job id that cannot be a RayJob's name."""


def rayjob_name(job_id: str) -> str:
    """Return the name of a job's RayJob: ``job_0f3c…`` → ``job-0f3c…``.

    The name identifies the job: the API server accepts it once.

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
    """Return the file name of a model's template, which is a key of a ConfigMap: ``llama-3.1-8b-1f0c3a5b7d.json``.

    A model's id may have any characters. The digest distinguishes ids that differ only in characters that a key lacks.
    """
    plain = re.sub(r"[^a-z0-9.]+", "-", model_id.lower()).strip("-.")[:60]
    digest = hashlib.sha256(model_id.encode()).hexdigest()[:10]
    return f"{plain}-{digest}.json" if plain else f"{digest}.json"


def run_time_template_key(accelerator: str) -> str:
    """Return the file name of the template for models that operators enable on an accelerator while the stack runs."""
    return f"run-time.{accelerator}.json"


def model_fingerprint(model: ModelSpec) -> str:
    """Return a digest of all settings of a model. A template is valid only for the model that it was rendered for."""
    fields = json.dumps(dataclasses.asdict(model), sort_keys=True, default=str)
    return hashlib.sha256(fields.encode()).hexdigest()[:32]
