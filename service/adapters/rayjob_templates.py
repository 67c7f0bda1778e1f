"""Reads the RayJob templates that were deployed with the model catalogue, and renders the objects of one job."""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import structlog

from ray_job.contract.job_spec import ENVIRONMENT_VARIABLE, JobSpec, ModelSpec
from ray_job.contract.object_keys import model_prefix
from ray_job.contract.rayjobs import (
    FINGERPRINT_ANNOTATION,
    GROUP,
    JOB_LABEL,
    MODEL_ANNOTATION,
    TOKEN_KEY,
    TOKEN_VOLUME,
    VERSION,
    model_fingerprint,
    rayjob_name,
    run_time_template_key,
    template_key,
)
from ray_job.contract.weights import WEIGHTS_VARIABLE
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
        problems += (f"{path}: {problem}" for problem in _template_problems(template, namespace))
        annotations = (template.get("metadata") or {}).get("annotations") or {}
        if annotations.get(FINGERPRINT_ANNOTATION) != model_fingerprint(model.spec):
            problems.append(f"{path}: was rendered for another version of the model {model.id!r}")
    if catalogue and not templates and not problems:
        problems.append(f"{directory}: has no template of any model")
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise SettingsError(
            f"CLOISTER_RAY_JOB_TEMPLATES: the templates do not fit the model catalogue; deploy both together:{lines}"
        )
    return templates


def load_run_time_templates(directory: Path, *, namespace: str) -> dict[str, Template]:
    """Return the template of models that operators enable while the stack runs, by their accelerator.

    Raises:
        SettingsError: a template is invalid.
    """
    templates: dict[str, Template] = {}
    prefix, suffix = run_time_template_key("*").split("*")
    for path in sorted(directory.glob(f"{prefix}*{suffix}")):
        try:
            template = json.loads(path.read_text(encoding="utf-8"))
            problem = next(_template_problems(template, namespace), "")
        except (OSError, ValueError, AttributeError) as error:
            problem = f"is not a template: {type(error).__name__}"
        if problem:
            raise SettingsError(f"CLOISTER_RAY_JOB_TEMPLATES: {path}: {problem}; deploy the stack again")
        templates[path.name.removeprefix(prefix).removesuffix(suffix)] = template
    return templates


def with_model(template: Template, model: ModelSpec) -> Template:
    """Return the template of an accelerator for one pushed model: its pods copy this model."""
    body = copy.deepcopy(dict(template))
    annotations = body["metadata"].setdefault("annotations", {})
    annotations |= {MODEL_ANNOTATION: model.id, FINGERPRINT_ANNOTATION: model_fingerprint(model)}
    weights = {
        "prefix": model_prefix(model.digest),
        "directory": model.source,
        "digest": model.digest,
        "load_format": str(model.engine_args.get("load_format", "auto")),
    }
    cluster = body["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *(cluster.get("workerGroupSpecs") or ())):
        for container in group["template"]["spec"].get("initContainers") or ():
            for variable in container.get("env") or ():
                if variable["name"] == WEIGHTS_VARIABLE:
                    variable["value"] = json.dumps(json.loads(variable["value"]) | weights, sort_keys=True)
    return body


def rayjob(template: Template, spec: JobSpec, *, owner: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the RayJob of a job: the template with its name, labels, job spec and the name of its token's Secret.

    Args:
        template: the template of the job's model.
        spec: the job.
        owner: reference to the object whose deletion ends the job.
    """
    body = copy.deepcopy(dict(template))
    metadata = body["metadata"]
    metadata["name"] = rayjob_name(spec.job_id)
    metadata["labels"] = {**(metadata.get("labels") or {}), JOB_LABEL: spec.job_id}
    if owner is not None:
        metadata["ownerReferences"] = [dict(owner)]
    cluster = body["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *(cluster.get("workerGroupSpecs") or ())):
        of_pods = group["template"].setdefault("metadata", {})
        of_pods["labels"] = {**(of_pods.get("labels") or {}), JOB_LABEL: spec.job_id}
    head = _head_pod(body)
    container = head["containers"][0]  # KubeRay runs Ray in the first one
    others = [variable for variable in container.get("env") or () if variable["name"] != ENVIRONMENT_VARIABLE]
    container["env"] = [*others, {"name": ENVIRONMENT_VARIABLE, "value": spec.to_json()}]
    for volume in _token_volumes(head):
        volume["secret"]["secretName"] = metadata["name"]
    return body


def token_secret(created: Mapping[str, Any], token: str) -> dict[str, Any]:
    """Return the Secret with the token of a job. Kubernetes deletes it with the RayJob, which owns it.

    Args:
        created: the RayJob as the API server returned it.
        token: the token of its job.
    """
    metadata = _owned_by(created, name=created["metadata"]["name"])
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "stringData": {TOKEN_KEY: token},
    }


def network_policy(created: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy by which the pods of a job, and of no other one, reach each other.

    Kubernetes deletes it with the RayJob. Its name differs from that of an earlier RayJob of the same name, which may
    not be deleted yet.

    Args:
        created: the RayJob as the API server returned it.
    """
    metadata = created["metadata"]
    pods = {"matchLabels": {JOB_LABEL: metadata["labels"][JOB_LABEL]}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _owned_by(created, name=f"{metadata['name']}-{metadata['uid']}"),
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [{"podSelector": pods}]}],
            "egress": [{"to": [{"podSelector": pods}]}],
        },
    }


def _owned_by(created: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """Return the metadata of an object that belongs to a RayJob and is deleted with it."""
    metadata = created["metadata"]
    owner = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "RayJob", "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "name": name,
        "namespace": metadata["namespace"],
        "labels": dict(metadata.get("labels") or {}),
        "ownerReferences": [owner],
    }


def _template_problems(template: Template, namespace: str) -> Iterator[str]:
    """Yield why a template is no RayJob that the launcher can complete."""
    if (template.get("apiVersion"), template.get("kind")) != (f"{GROUP}/{VERSION}", "RayJob"):
        yield f"is not a RayJob of {GROUP}/{VERSION}"
    found = (template.get("metadata") or {}).get("namespace")
    if found != namespace:
        yield f"is for the namespace {found!r}, not {namespace!r}"
    try:
        head = _head_pod(template)
        head["containers"][0]
    except (KeyError, IndexError, TypeError):
        yield "has no container for the Ray head"
    else:
        if not _token_volumes(head):
            yield f"the pod of the Ray head has no Secret volume {TOKEN_VOLUME}"


def _head_pod(template: Template) -> dict[str, Any]:
    head: dict[str, Any] = template["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    return head


def _token_volumes(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [volume for volume in pod.get("volumes") or () if volume["name"] == TOKEN_VOLUME and "secret" in volume]
