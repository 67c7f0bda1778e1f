"""Manifests of a stack file in the cluster, without Pulumi, for tests of the API server's clients."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from infra.rendering.manifests import Manifest, manifests
from infra.rendering.render import record_stack
from ray_job.contract.cluster import RECONCILER
from ray_job.contract.job_spec import JobSpec, ModelSpec
from ray_job.contract.rayjobs import MODEL_ANNOTATION
from tests.cluster.api import KubernetesApi
from tests.cluster.control_plane import ControlPlane

DEV: Final = Path(__file__).parents[2] / "Pulumi.dev.yaml"
SERVICE: Final = "cloister-acme-dev"
JOBS: Final = "cloister-acme-dev-jobs"
MODEL: Final = "demo"
TOKEN: Final = "token-of-a-job"
# In order of dependency. Kinds that create pods are left out.
_KINDS: Final = (
    "Namespace",
    "PriorityClass",
    "ResourceQuota",
    "LimitRange",
    "ServiceAccount",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
    "Role",
    "RoleBinding",
    "NetworkPolicy",
    "Secret",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """Namespaces of a stack with everything in them except pods.

    Attributes:
        reconciler: kubeconfig with a token of the reconciler's service account.
        templates: RayJob template of each model, by model id.
    """

    reconciler: Path
    templates: dict[str, dict[str, Any]]


@contextmanager
def deployed_stack(cluster: ControlPlane, api: KubernetesApi, *, file: Path = DEV) -> Iterator[Deployed]:
    """Create the objects of a stack file, and delete them afterwards."""
    wanted = manifests(record_stack(file))
    made = [each for kind in _KINDS for each in wanted if each.kind == kind]
    for each in made:
        api.create(each.body)
    (service,) = (each.namespace for each in made if each.kind == "ServiceAccount" and each.name == RECONCILER)
    token = api.token(RECONCILER, service)
    try:
        yield Deployed(
            reconciler=cluster.access.kubeconfig(cluster.server, cluster.ca_file, user=RECONCILER, token=token),
            templates=_templates(wanted),
        )
    finally:
        for each in made:
            if not each.namespace:
                api.delete(each.body["apiVersion"], each.kind, each.name)
        for each in made:
            if each.kind == "Namespace":
                api.wait_until_gone("v1", "Namespace", each.name, within_s=120)


def job_spec(number: int, *, model: str = MODEL) -> JobSpec:
    """Return the spec of a job that never runs."""
    return JobSpec(
        job_id=f"job_{number:032x}",
        coordinator_url="http://coordinator:8100",
        model=ModelSpec(id=model, source=f"/models/{model}"),
    )


def _templates(wanted: tuple[Manifest, ...]) -> dict[str, dict[str, Any]]:
    holder = next(each for each in wanted if each.kind == "ConfigMap" and each.name == "ray-job-templates")
    templates = (json.loads(text) for text in holder.body["data"].values())
    return {template["metadata"]["annotations"][MODEL_ANNOTATION]: template for template in templates}
