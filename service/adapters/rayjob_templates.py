"""Reads the RayJob templates that were deployed with the model catalogue, and completes one for a job."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from ray_job.contract.job_spec import ENVIRONMENT_VARIABLE, JobSpec
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
    """Return the template of each model of the catalogue that has one, by the model's id.

    Batches of a model without a template fail with the reason; other models are not affected.

    Raises:
        SettingsError: templates are invalid (the message lists every problem), or no model has one.
    """
    templates: dict[str, Template] = {}
    problems: list[str] = []
    for model in catalogue.values():
        path = directory / template_key(model.id)
        try:
            template = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            logger.warning("rayjob.no_template", model=model.id, file=str(path))
            continue
        except OSError as error:
            problems.append(f"{path}: cannot be read: {error.strerror}")
            continue
        except ValueError as error:
            problems.append(f"{path}: is not JSON: {error}")
            continue
        if not isinstance(template, dict):
            problems.append(f"{path}: is not a JSON object")
            continue
        templates[model.id] = template
        if (template.get("apiVersion"), template.get("kind")) != (f"{GROUP}/{VERSION}", "RayJob"):
            problems.append(f"{path}: is not a RayJob of {GROUP}/{VERSION}")
        metadata = template.get("metadata") or {}
        if metadata.get("namespace") != namespace:
            problems.append(f"{path}: is for the namespace {metadata.get('namespace')!r}, not {namespace!r}")
        if (metadata.get("annotations") or {}).get(FINGERPRINT_ANNOTATION) != model_fingerprint(model.spec):
            problems.append(f"{path}: was rendered for another version of the model {model.id!r}")
        try:
            _head_container(template)
        except (KeyError, IndexError, TypeError):
            problems.append(f"{path}: has no container for the Ray head")
    if catalogue and not templates and not problems:
        problems.append(f"{directory}: has no template of any model")
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise SettingsError(
            f"CLOISTER_RAY_JOB_TEMPLATES: the templates do not fit the model catalogue; deploy both together:{lines}"
        )
    return templates


def rayjob(template: Template, spec: JobSpec) -> dict[str, Any]:
    """Return the RayJob of a job: the template with a name, the labels of the batch and the job spec."""
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
    # KubeRay runs Ray in the first container.
    head: dict[str, Any] = template["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    return head
