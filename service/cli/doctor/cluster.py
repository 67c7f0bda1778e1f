"""The part of the doctor that looks at a cluster from the machine that runs `pulumi up`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from service.cli.doctor import nodes, permissions, requirements, workloads
from service.cli.doctor.cluster_api import ClusterApi, ClusterError, JsonObject
from service.cli.doctor.findings import Finding, RefusedError, failed, not_checked, told
from service.errors import CloisterError, SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to look at.

    Attributes:
        namespace: the service's, ``cloister-acme-prod``; empty before there is a stack.
        storage_class: of the stack file; empty for the cluster's default.
    """

    namespace: str
    storage_class: str

    @property
    def jobs_namespace(self) -> str:
        """``cloister-acme-prod-jobs``."""
        return f"{self.namespace}-jobs" if self.namespace else ""

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Both, or none."""
        return (self.namespace, self.jobs_namespace) if self.namespace else ()


def cluster_findings(api: ClusterApi, wanted: Wanted) -> Iterator[Finding]:
    """Every check of the cluster, one after the other."""
    try:
        yield from requirements.kubernetes_version(api)
    except CloisterError as error:
        yield failed("Kubernetes", str(error))
        is_login = isinstance(error, RefusedError) or (isinstance(error, ClusterError) and error.is_login)
        why = "its API does not take this login: log in anew" if is_login else "its API does not answer"
        yield not_checked("everything else in the cluster", why)
        return
    is_deployed = bool(wanted.namespace) and _is_there(api, wanted.namespace)
    yield from told("permissions", lambda: permissions.permissions(api, wanted.namespaces))
    yield from told("storage class", lambda: _storage(api, wanted, is_deployed=is_deployed))
    yield from told("metrics", lambda: requirements.metrics(api))
    yield from told("KubeRay", lambda: requirements.kuberay(api, wanted.jobs_namespace, is_deployed=is_deployed))
    yield from told("node pools", lambda: _pools(api, wanted, is_deployed=is_deployed))
    if not wanted.namespace:
        yield not_checked("the stack", "no --namespace is given: the output `service_namespace` of the stack")
        return
    if not is_deployed:
        yield not_checked("the stack", f"there is no namespace {wanted.namespace}; `pulumi up` makes it")
        return
    for namespace in wanted.namespaces:
        yield from told(f"pod security of {namespace}", partial(workloads.pod_security, api, namespace))
    yield from told("network policies", lambda: workloads.policies(api, wanted.namespaces))
    yield from told("volumes of models", lambda: _weights(api, wanted))
    yield from told("workloads", lambda: workloads.workloads(api, wanted.namespace))
    for namespace in wanted.namespaces:
        is_of_jobs = namespace == wanted.jobs_namespace
        yield from told(
            f"pods of {namespace}",
            partial(workloads.pods, api, namespace, may_wait=is_of_jobs),
        )


def _is_there(api: ClusterApi, namespace: str) -> bool:
    try:
        return api.find(f"/api/v1/namespaces/{namespace}") is not None
    except CloisterError:
        # Who may not look at namespaces may still see what is in them; the checks tell.
        return True


def _storage(api: ClusterApi, wanted: Wanted, *, is_deployed: bool) -> Iterator[Finding]:
    path = f"/api/v1/namespaces/{wanted.namespace}/persistentvolumeclaims"
    yield from requirements.storage_class(api, wanted.storage_class, api.items(path) if is_deployed else None)


def _pools(api: ClusterApi, wanted: Wanted, *, is_deployed: bool) -> Iterator[Finding]:
    groups = _groups(api, wanted.namespace) if is_deployed else []
    yield from nodes.judge_nodes(api.items("/api/v1/nodes"), groups, is_deployed=is_deployed)


def _weights(api: ClusterApi, wanted: Wanted) -> Iterator[Finding]:
    claims = {claim for group in _groups(api, wanted.namespace) for claim in group.claims}
    if claims:
        path = f"/api/v1/namespaces/{wanted.jobs_namespace}/persistentvolumeclaims"
        yield workloads.judge_claims(sorted(claims), api.items(path), wanted.jobs_namespace)


def _groups(api: ClusterApi, namespace: str) -> list[nodes.Group]:
    """What the models of the stack ask for.

    Raises:
        SettingsError: a template is none.
    """
    held: JsonObject = api.find(f"/api/v1/namespaces/{namespace}/configmaps/ray-job-templates") or {}
    try:
        return list(nodes.groups({name: json.loads(text) for name, text in (held.get("data") or {}).items()}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(
            f"the ConfigMap ray-job-templates of {namespace} holds a template that is no RayJob: `pulumi up --refresh` "
            "makes it again"
        ) from error
