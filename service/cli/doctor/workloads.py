"""The stack's namespaces as the cluster has them: pod security, policies, and whether its pods run."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from service.cli.doctor.cluster_api import ClusterApi, ClusterError, JsonObject
from service.cli.doctor.findings import Finding, RefusedError, failed, not_checked, ok
from service.cli.doctor.relay import DEPLOYMENTS

_ENFORCE: Final = "pod-security.kubernetes.io/enforce"
_PROFILE: Final = "restricted"
_DENY: Final = "default-deny"
# What a container waits for that nothing but a change will end.
_STUCK: Final = {
    "ErrImagePull": "the node cannot pull its image: check digest, registry, mirror and pull secret",
    "ImagePullBackOff": "the node cannot pull its image: check digest, registry, mirror and pull secret",
    "InvalidImageName": "its image is no reference",
    "CreateContainerConfigError": "a ConfigMap or Secret that it names is missing",
    "CreateContainerError": "the node cannot make its container",
    "CrashLoopBackOff": "it ends as soon as it starts; `kubectl logs --previous` says why",
}
_MAX_MESSAGE: Final = 300
# Refused by the restricted profile for one reason only.
_PRIVILEGED: Final[dict[str, Any]] = {
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


def pod_security(api: ClusterApi, namespace: str) -> Iterator[Finding]:
    """Whether the namespace says that it takes restricted pods only, and the API server heeds it."""
    check = f"pod security of {namespace}"
    found = api.find(f"/api/v1/namespaces/{namespace}")
    if found is None:
        yield not_checked(check, "there is no such namespace yet; `pulumi up` makes it")
        return
    profile = found["metadata"].get("labels", {}).get(_ENFORCE, "none")
    if profile != _PROFILE:
        yield failed(
            check, f"its label {_ENFORCE} says {profile}, not {_PROFILE}: somebody changed it; `pulumi up --refresh`"
        )
        return
    pod = _PRIVILEGED | {"metadata": {"name": "cloister-doctor", "namespace": namespace}}
    try:
        api.try_to_create(f"/api/v1/namespaces/{namespace}/pods", pod)
    except RefusedError as error:
        if "PodSecurity" in str(error):
            yield ok(check, f"{_PROFILE}: a privileged pod is refused (dry run)")
        else:
            yield not_checked(check, f"labelled {_PROFILE}; whether the API server heeds it cannot be tried: {error}")
    except ClusterError as error:
        yield not_checked(check, f"labelled {_PROFILE}; whether the API server heeds it cannot be tried: {error}")
    else:
        yield failed(
            check, "it is labelled, but a privileged pod is let in (dry run): switch on the API server's PodSecurity"
        )


def policies(api: ClusterApi, namespaces: Sequence[str]) -> Iterator[Finding]:
    """Whether the network policies are there. Whether something enforces them is seen from pods only."""
    for namespace in namespaces:
        check = f"network policies of {namespace}"
        names = [
            each["metadata"]["name"]
            for each in api.items(f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies")
        ]
        if _DENY in names:
            yield ok(
                check, f"there are {len(names)}, {_DENY} among them; whether they are enforced is seen from the pods"
            )
        else:
            yield failed(
                check, f"{_DENY} is missing: pods are open to all others. `pulumi up --refresh` makes it again"
            )


def workloads(api: ClusterApi, namespace: str) -> Iterator[Finding]:
    """Deployments and StatefulSets of the service."""
    deployments, stateful_sets = (
        api.items(f"/apis/apps/v1/namespaces/{namespace}/{plural}") for plural in ("deployments", "statefulsets")
    )
    there = {each["metadata"]["name"] for each in deployments}
    for name in DEPLOYMENTS:
        if name not in there:
            yield failed(
                f"Deployment {name}", f"it is not in {namespace}: the stack is not there, or half; `pulumi up`"
            )
    yield from (judge_workload("Deployment", each) for each in deployments)
    yield from (judge_workload("StatefulSet", each) for each in stateful_sets)


def judge_workload(kind: str, body: JsonObject) -> Finding:
    """Whether as many pods are ready as there should be, and all of the newest version."""
    check, status = f"{kind} {body['metadata']['name']}", body.get("status", {})
    wanted, ready = body["spec"].get("replicas", 1), status.get("readyReplicas", 0)
    if kind == "Deployment" and not wanted:
        return failed(check, "somebody scaled it to 0 pods: `kubectl scale`, or `pulumi up --refresh`")
    if ready < wanted:
        return failed(check, f"{ready} of {wanted} pods are ready; the lines on pods, or `kubectl logs`, say why")
    # Pods of the version before count as ready too, and stay until new ones are.
    new = status.get("updatedReplicas", 0)
    if new < wanted or status.get("observedGeneration", 0) < body["metadata"].get("generation", 0):
        return failed(
            check,
            f"its rollout is not through: {new} of {wanted} pods are of its newest version. If that stays, the lines "
            "on pods, or `kubectl describe`, say why",
        )
    return ok(check, f"{ready} of {wanted} pods are ready")


def judge_claims(wanted: Sequence[str], there: Sequence[JsonObject], namespace: str) -> Finding:
    """Whether the volumes with models are there.

    Args:
        wanted: the names of the claims that pods of jobs mount.
        there: the claims of the namespace of jobs.
        namespace: its name.
    """
    check = "volumes of models"
    phases = {each["metadata"]["name"]: each.get("status", {}).get("phase", "Pending") for each in there}
    found = {name: phases.get(name, "missing") for name in wanted}
    told = f"in {namespace}: {', '.join(f'{name} ({phase})' for name, phase in found.items())}"
    if bad := [name for name, phase in found.items() if phase in {"missing", "Lost"}]:
        return failed(check, f"{told}: pods of jobs wait for {', '.join(bad)} for ever; make the claim with the models")
    if set(found.values()) != {"Bound"}:
        return not_checked(check, f"{told}; its storage class may bind it with the first pod that mounts it")
    return ok(check, told)


def pods(api: ClusterApi, namespace: str, *, may_wait: bool) -> Iterator[Finding]:
    """Pods that will not run without a change.

    Args:
        api: the cluster.
        namespace: theirs.
        may_wait: whether it is normal that one waits for room, as pods of jobs do.
    """
    found = api.items(f"/api/v1/namespaces/{namespace}/pods")
    problems = [problem for pod in found for problem in pod_problems(pod, may_wait=may_wait)]
    check = f"pods of {namespace}"
    if problems:
        yield failed(check, "; ".join(problems))
    else:
        yield ok(check, f"{len(found)}, none is stuck")


def pod_problems(pod: JsonObject, *, may_wait: bool) -> Iterator[str]:
    """Why a pod does not run, where waiting does not help."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for condition in status.get("conditions", []) if not may_wait else ():
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            yield f"{name} finds no node: {_short(condition)}"
    for container in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
        waiting = container.get("state", {}).get("waiting", {})
        if meaning := _STUCK.get(waiting.get("reason", "")):
            yield f"{name}, container {container['name']}: {waiting['reason']}, {meaning} ({_short(waiting)})"


def _short(told: JsonObject) -> str:
    return " ".join(str(told.get("message") or "no message").split())[:_MAX_MESSAGE]
