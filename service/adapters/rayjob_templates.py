"""Reads the RayJob templates that were deployed with the model catalogue, and fills one in for a job."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from ray_job.contract.job_spec import ENVIRONMENT_VARIABLE, JobSpec, ModelSpec
from ray_job.contract.rayjobs import (
    ATTEMPT_LABEL,
    BATCH_LABEL,
    FINGERPRINT_ANNOTATION,
    GROUP,
    VERSION,
    model_fingerprint,
    rayjob_name,
    template_key,
)
from service.errors import SettingsError
from service.model_catalogue import Catalogue

logger = structlog.get_logger(__name__)

Template = Mapping[str, Any]


def load_templates(directory: Path, catalogue: Catalogue, *, namespace: str) -> dict[str, Template]:
    """The template of each model of the catalogue that has one, by the model's id.

    A model without one cannot run here, which its batches are told; it keeps no other model from running.

    Raises:
        SettingsError: one or more are wrong, and the message lists all of them, or no model has one.
    """
    templates: dict[str, Template] = {}
    problems: list[str] = []
    for model in catalogue.models.values():
        path = directory / template_key(model.id)
        template = _read(path, model.id, problems)
        if template is not None:
            found = [f"{path}: {problem}" for problem in _problems(template, model.spec, namespace)]
            problems += found
            templates[model.id] = template
    if catalogue.models and not templates and not problems:
        problems.append(f"{directory}: has no template of any model")
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise SettingsError(
            f"CLOISTER_RAY_JOB_TEMPLATES: the templates do not fit the model catalogue; deploy both together:{lines}"
        )
    return templates


def _read(path: Path, model: str, problems: list[str]) -> Template | None:
    try:
        template = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        logger.warning("rayjob.no_template", model=model, file=str(path))
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
    except ValueError as error:
        problems.append(f"{path}: is not JSON: {error}")
    else:
        if isinstance(template, dict):
            return template
        problems.append(f"{path}: is not a JSON object")
    return None


def _problems(template: Template, model: ModelSpec, namespace: str) -> list[str]:
    problems: list[str] = []
    if (template.get("apiVersion"), template.get("kind")) != (f"{GROUP}/{VERSION}", "RayJob"):
        problems.append(f"is no RayJob of {GROUP}/{VERSION}")
    metadata = template.get("metadata") or {}
    if metadata.get("namespace") != namespace:
        problems.append(f"is for the namespace {metadata.get('namespace')!r}, not {namespace!r}")
    if (metadata.get("annotations") or {}).get(FINGERPRINT_ANNOTATION) != model_fingerprint(model):
        problems.append(f"was rendered for another version of the model {model.id!r}")
    try:
        _head_container(template)
    except (KeyError, IndexError, TypeError):
        problems.append("has no container of the Ray head")
    return problems


def rayjob(template: Template, spec: JobSpec) -> dict[str, Any]:
    """The RayJob of a job: the template with a name, the labels of the batch and the job spec."""
    body = copy.deepcopy(dict(template))
    metadata = body["metadata"]
    metadata["name"] = rayjob_name(spec.job_id)
    metadata["labels"] = {
        **(metadata.get("labels") or {}),
        BATCH_LABEL: spec.batch_id,
        ATTEMPT_LABEL: str(spec.attempt),
    }
    head = _head_container(body)
    others = [variable for variable in head.get("env") or () if variable["name"] != ENVIRONMENT_VARIABLE]
    head["env"] = [*others, {"name": ENVIRONMENT_VARIABLE, "value": spec.to_json()}]
    return body


def _head_container(template: Template) -> dict[str, Any]:
    # KubeRay takes the first container for Ray's own.
    head: dict[str, Any] = template["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    return head
