"""The cluster as the user of a kubeconfig sees it, before and after the first `pulumi up`."""

from collections.abc import Iterator
from typing import Final

from ray_job.contract.cluster import MIN_KUBERNETES, jobs_namespace
from service.adapters.rayjobs_api import NOT_FOUND
from service.doctor.cluster_api import ClusterApi
from service.doctor.findings import ClusterError, Finding, run_check
from service.doctor.kuberay import check_kuberay, minor_version
from service.doctor.nodes import check_node_pools
from service.doctor.permissions import check_permissions
from service.doctor.workloads import (
    check_model_volumes,
    check_network_policies,
    check_pod_security,
    check_pods,
    check_workloads,
)
from service.errors import CloisterError

_LOGIN_ERRORS: Final = (401, 403)
_DEFAULT_CLASS: Final = "storageclass.kubernetes.io/is-default-class"


def check_cluster(api: ClusterApi, *, namespace: str, storage_class: str) -> Iterator[Finding]:
    """Run all checks of the cluster, one after the other.

    Args:
        api: the cluster.
        namespace: the service namespace of the stack, ``cloister-acme-prod``; empty before there is a stack.
        storage_class: the storage class in the stack file; empty for the cluster's default.
    """
    try:
        version = str(api.read("/version").get("gitVersion", ""))  # v1.35.3+k3s1
    except CloisterError as error:
        yield Finding.failed("Kubernetes", str(error))
        is_login = isinstance(error, ClusterError) and error.status in _LOGIN_ERRORS
        reason = "the API server does not accept this login: log in again" if is_login else "its API does not answer"
        yield Finding.not_checked("everything else in the cluster", reason)
        return
    minor, oldest = minor_version(version), ".".join(map(str, MIN_KUBERNETES))
    if not minor or minor[0] == 0:
        yield Finding.not_checked(
            "Kubernetes", f"{api.server} reports no version ({version}); a stack needs {oldest} or newer"
        )
    elif minor < MIN_KUBERNETES:
        yield Finding.failed("Kubernetes", f"{api.server} runs {version}; a stack needs {oldest} or newer: upgrade it")
    else:
        yield Finding.ok("Kubernetes", f"{api.server} runs {version}")
    jobs = jobs_namespace(namespace) if namespace else ""
    namespaces = (namespace, jobs) if namespace else ()
    try:
        is_deployed = bool(namespace) and api.find(f"/api/v1/namespaces/{namespace}") is not None
    except CloisterError:
        is_deployed = True  # a user who may not read namespaces may still read what they contain
    deployed_namespace = namespace if is_deployed else ""
    yield from run_check("permissions", check_permissions, api, namespaces)
    yield from run_check("storage class", check_storage, api, storage_class, deployed_namespace)
    yield from run_check("metrics", check_metrics, api)
    yield from run_check("KubeRay", check_kuberay, api, jobs, is_deployed=is_deployed)
    yield from run_check("node pools", check_node_pools, api, deployed_namespace)
    if not is_deployed:
        missing = f"there is no namespace {namespace}; `pulumi up` creates it"
        unknown = "no --namespace is given; `pulumi stack output service_namespace` prints it"
        yield Finding.not_checked("the stack", missing if namespace else unknown)
        return
    for each in namespaces:
        yield from run_check(f"pod security of {each}", check_pod_security, api, each)
    for each in namespaces:
        yield from run_check(f"network policies of {each}", check_network_policies, api, each)
    yield from run_check("volumes of models", check_model_volumes, api, namespace)
    yield from run_check("workloads", check_workloads, api, namespace)
    for each in namespaces:
        yield from run_check(f"pods of {each}", check_pods, api, each, may_wait=each == jobs)


def check_storage(api: ClusterApi, storage_class: str, namespace: str) -> Iterator[Finding]:
    """Check the volumes of the stack, and the storage class of new volumes.

    Args:
        api: the cluster.
        storage_class: the name of the class; empty for the cluster's default.
        namespace: the service namespace; empty before there is a stack.
    """
    if namespace:
        claims = api.items(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims")
        phases = {each["metadata"]["name"]: each.get("status", {}).get("phase", "Pending") for each in claims}
        if waiting := [name for name, phase in phases.items() if phase != "Bound"]:
            yield Finding.failed(
                "volumes",
                f"not bound: {', '.join(waiting)}. `kubectl describe persistentvolumeclaim` shows the reason, such as "
                "a missing storage class or a lack of space",
            )
        elif phases:
            yield Finding.ok("volumes", f"bound: {', '.join(phases)}")
    classes = {each["metadata"]["name"]: each for each in api.items("/apis/storage.k8s.io/v1/storageclasses")}
    present = f"The cluster has: {', '.join(classes)}" if classes else "The cluster has none"
    defaults = [
        name
        for name, each in classes.items()
        if (each["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"
    ]
    check = "storage class"
    if storage_class and storage_class not in classes:
        yield Finding.failed(check, f"there is no {storage_class}. {present}")
    elif storage_class:
        yield Finding.ok(check, f"{storage_class}, by {classes[storage_class].get('provisioner')}")
    elif defaults:
        yield Finding.ok(check, f"{defaults[0]} is the default, by {classes[defaults[0]].get('provisioner')}")
    elif namespace:
        yield Finding.not_checked(check, f"none is the default; this stack needs none for new volumes. {present}")
    else:
        yield Finding.failed(
            check,
            f"none is the default. {present}. Mark one: `kubectl annotate storageclass NAME {_DEFAULT_CLASS}=true`; or "
            "name one in the stack file and here with --storage-class. Stacks with external Postgres and S3 need none",
        )


def check_metrics(api: ClusterApi) -> Iterator[Finding]:
    """Check the metrics API, which the autoscaler of the API's pods reads."""
    try:
        api.read("/apis/metrics.k8s.io/v1beta1/nodes")
    except ClusterError as error:
        if error.is_forbidden:
            raise
        advice = (
            "Install metrics-server"
            if error.status == NOT_FOUND
            else f"Check that the pods of metrics-server run: {error}"
        )
        yield Finding.failed("metrics", f"metrics.k8s.io does not answer: the API's pods do not scale. {advice}")
    else:
        yield Finding.ok("metrics", "metrics.k8s.io answers")
