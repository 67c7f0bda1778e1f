"""The namespaces of a stack: pod security, workloads, volumes of models, and pods that cannot run."""

from collections.abc import Iterator
from typing import Any, Final

from ray_job.contract.cluster import (
    API,
    COORDINATOR,
    DEFAULT_DENY,
    POD_SECURITY_LABEL,
    POD_SECURITY_PROFILE,
    RECONCILER,
    jobs_namespace,
)
from service.doctor.cluster_api import ClusterApi
from service.doctor.findings import ClusterError, Finding
from service.doctor.nodes import read_pod_groups

# States of a waiting container that waiting does not end.
_STUCK: Final = {
    "ErrImagePull": "the node cannot pull the image: check digest, registry, mirror and pull secret",
    "ImagePullBackOff": "the node cannot pull the image: check digest, registry, mirror and pull secret",
    "InvalidImageName": "the image is not a valid reference",
    "CreateContainerConfigError": "a ConfigMap or Secret that it refers to is missing",
    "CreateContainerError": "the node cannot create the container",
    "CrashLoopBackOff": "it exits right after its start; `kubectl logs --previous` shows the reason",
}
_MAX_MESSAGE: Final = 300
# The restricted profile refuses it because it is privileged, and for no other reason.
_PRIVILEGED_POD: Final[dict[str, Any]] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "cloister-doctor"},
    "spec": {
        "containers": [
            {
                "name": "none",
                "image": "none",
                "securityContext": {"privileged": True},
                "resources": {
                    "requests": {"cpu": "1m", "memory": "1Mi"},
                    "limits": {"cpu": "1m", "memory": "1Mi"},
                },
            }
        ]
    },
}


def check_pod_security(api: ClusterApi, namespace: str) -> Iterator[Finding]:
    """Check that a namespace has the restricted profile and that the API server enforces it."""
    check = f"pod security of {namespace}"
    found = api.find(f"/api/v1/namespaces/{namespace}")
    if found is None:
        yield Finding.not_checked(check, "the namespace does not exist yet; `pulumi up` creates it")
        return
    profile = found["metadata"].get("labels", {}).get(POD_SECURITY_LABEL, "none")
    if profile != POD_SECURITY_PROFILE:
        yield Finding.failed(
            check,
            f"its label {POD_SECURITY_LABEL} is {profile}, not {POD_SECURITY_PROFILE}: run `pulumi up --refresh`",
        )
        return
    pod = _PRIVILEGED_POD | {"metadata": {"name": "cloister-doctor", "namespace": namespace}}
    try:
        api.dry_run_create(f"/api/v1/namespaces/{namespace}/pods", pod)
    except ClusterError as error:
        if error.is_forbidden and "PodSecurity" in str(error):
            yield Finding.ok(check, f"{POD_SECURITY_PROFILE}: a privileged pod is refused (dry run)")
        else:
            yield Finding.not_checked(
                check, f"labelled {POD_SECURITY_PROFILE}; a dry run cannot show whether it is enforced: {error}"
            )
    else:
        yield Finding.failed(
            check,
            "it has the label, but a privileged pod is accepted (dry run): enable PodSecurity on the API server",
        )


def check_network_policies(api: ClusterApi, namespace: str) -> Iterator[Finding]:
    """Check that the network policies exist. Only a pod can check that they are enforced."""
    check = f"network policies of {namespace}"
    path = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
    names = [each["metadata"]["name"] for each in api.items(path)]
    if DEFAULT_DENY in names:
        yield Finding.ok(
            check, f"{len(names)} exist, including {DEFAULT_DENY}; the pods check whether they are enforced"
        )
    else:
        yield Finding.failed(
            check, f"{DEFAULT_DENY} is missing: pods accept traffic of all others. `pulumi up --refresh` restores it"
        )


def check_workloads(api: ClusterApi, namespace: str) -> Iterator[Finding]:
    """Check the Deployments and StatefulSets of a stack: all pods must be ready and of the newest version."""
    path = f"/apis/apps/v1/namespaces/{namespace}"
    deployments, stateful_sets = api.items(f"{path}/deployments"), api.items(f"{path}/statefulsets")
    present = {each["metadata"]["name"] for each in deployments}
    for name in (RECONCILER, COORDINATOR, API):
        if name not in present:
            yield Finding.failed(
                f"Deployment {name}", f"it is not in {namespace}: the stack is missing or incomplete; run `pulumi up`"
            )
    workloads = [("Deployment", each) for each in deployments] + [("StatefulSet", each) for each in stateful_sets]
    for kind, body in workloads:
        check, status = f"{kind} {body['metadata']['name']}", body.get("status", {})
        wanted, ready = body["spec"].get("replicas", 1), status.get("readyReplicas", 0)
        updated = status.get("updatedReplicas", 0)
        is_observed = status.get("observedGeneration", 0) >= body["metadata"].get("generation", 0)
        if kind == "Deployment" and not wanted:
            yield Finding.failed(check, "it is scaled to 0 pods: `kubectl scale`, or `pulumi up --refresh`")
        elif ready < wanted:
            yield Finding.failed(
                check, f"{ready} of {wanted} pods are ready; the findings on pods, or `kubectl logs`, show the reason"
            )
        # Pods of the previous version count as ready too, and stay until new pods are ready.
        elif updated < wanted or not is_observed:
            yield Finding.failed(
                check,
                f"its rollout is incomplete: {updated} of {wanted} pods have the newest version. If this does not "
                "change, the findings on pods, or `kubectl describe`, show the reason",
            )
        else:
            yield Finding.ok(check, f"{ready} of {wanted} pods are ready")


def check_model_volumes(api: ClusterApi, namespace: str) -> Iterator[Finding]:
    """Check the volume claims that the job templates of a stack mount, if they mount any."""
    check, jobs = "volumes of models", jobs_namespace(namespace)
    names = sorted({claim for group in read_pod_groups(api, namespace) for claim in group.claims})
    if not names:
        return
    claims = api.items(f"/api/v1/namespaces/{jobs}/persistentvolumeclaims")
    phases = {each["metadata"]["name"]: each.get("status", {}).get("phase", "Pending") for each in claims}
    found = {name: phases.get(name, "missing") for name in names}
    listed = f"in {jobs}: {', '.join(f'{name} ({phase})' for name, phase in found.items())}"
    if unusable := [name for name, phase in found.items() if phase in {"missing", "Lost"}]:
        yield Finding.failed(
            check,
            f"{listed}: pods of jobs stay Pending without {', '.join(unusable)}; create the claim with the models",
        )
    elif set(found.values()) != {"Bound"}:
        yield Finding.not_checked(check, f"{listed}; the storage class may bind it with the first pod that mounts it")
    else:
        yield Finding.ok(check, listed)


def check_pods(api: ClusterApi, namespace: str, *, may_wait: bool) -> Iterator[Finding]:
    """Check for pods that do not run and that waiting does not help.

    Args:
        api: the cluster.
        namespace: the namespace of the pods.
        may_wait: whether pods may wait for a node, as pods of jobs do.
    """
    check, pods = f"pods of {namespace}", api.items(f"/api/v1/namespaces/{namespace}/pods")
    problems: list[str] = []
    for pod in pods:
        name, status = pod["metadata"]["name"], pod.get("status", {})
        stuck = [
            (f"{name} fits on no node", condition)
            for condition in status.get("conditions", [])
            if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable" and not may_wait
        ]
        for container in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
            waiting = container.get("state", {}).get("waiting", {})
            if meaning := _STUCK.get(waiting.get("reason", "")):
                stuck.append((f"{name}, container {container['name']}: {waiting['reason']}, {meaning}", waiting))
        for problem, source in stuck:
            message = " ".join(str(source.get("message") or "no message").split())
            problems.append(f"{problem}: {message[:_MAX_MESSAGE]}")
    if problems:
        yield Finding.failed(check, "; ".join(problems))
    else:
        yield Finding.ok(check, f"{len(pods)}, none is stuck")
