"""Readiness of objects: what `pulumi up` waits for, and what blocks it."""

import time
from collections.abc import Iterator
from typing import Any, Final

from tests.cluster.api import KubernetesApi

JsonObject = dict[str, Any]

_PAUSE_S: Final = 0.5
_EVENTS: Final = 6
_SKIP: Final = "pulumi.com/skipAwait"


class NeverReadyError(Exception):
    """The object cannot become ready: its Job has failed, or its rollout is too late."""


def wait_until_ready(api: KubernetesApi, body: JsonObject, *, within_s: float) -> JsonObject:
    """Wait for an object of a kind that becomes ready, unless its annotation skips the wait.

    Args:
        api: API server of the cluster.
        body: the object as it was applied.
        within_s: timeout.

    Returns:
        The object as it is then.

    Raises:
        NeverReadyError: it has failed.
        TimeoutError: it is not ready yet. Both messages contain the state of its pods and the last warnings.
    """
    metadata = body["metadata"]
    place = (body["apiVersion"], body["kind"], metadata["name"], metadata.get("namespace", ""))
    end = time.monotonic() + within_s
    while True:
        live = api.find(*place) or {}
        if (metadata.get("annotations") or {}).get(_SKIP) == "true" or not (why := unready(api, live)):
            return live
        if (failure := _failure(live)) or time.monotonic() > end:
            details = "\n  ".join([why, *_pods(api, live), *_warnings(api, place[3])])
            kind = NeverReadyError if failure else TimeoutError
            raise kind(
                f"{place[1]} {place[3]}/{place[2]}: {failure or f'not ready after {within_s:.0f} s'}\n  {details}"
            )
        time.sleep(_PAUSE_S)


def unready(api: KubernetesApi, live: JsonObject) -> str:
    """Return what the object lacks to be ready; empty for a ready object and for kinds without readiness."""
    kind, status, spec = live.get("kind"), live.get("status") or {}, live.get("spec") or {}
    if not live:
        return "it does not exist"
    if kind in ("Deployment", "StatefulSet"):
        return _unready_pods(live, status, spec)
    if kind == "Job" and _condition(status, "Complete") != "True":
        return "it has not completed"
    if kind == "PersistentVolumeClaim" and status.get("phase") != "Bound":
        return f"it is {status.get('phase', 'new')}"
    if kind == "Service" and spec.get("selector") and not _has_endpoint(api, live):
        return "no pod behind it is ready"
    return ""


def _unready_pods(live: JsonObject, status: JsonObject, spec: JsonObject) -> str:
    wanted = spec.get("replicas", 1)
    ready = "availableReplicas" if live["kind"] == "Deployment" else "readyReplicas"
    if status.get("observedGeneration", 0) < live["metadata"]["generation"]:
        return "its controller has not looked at it yet"
    for what in (ready, "updatedReplicas"):
        if status.get(what, 0) < wanted:
            return f"{what} is {status.get(what, 0)} of {wanted}"
    if (there := status.get("replicas", 0)) > wanted:
        return f"{there - wanted} old pods are still there"
    return ""


def _failure(live: JsonObject) -> str:
    status = live.get("status") or {}
    for condition in status.get("conditions") or ():
        is_late = condition["type"] == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded"
        if is_late or (live["kind"] == "Job" and condition["type"] == "Failed" and condition["status"] == "True"):
            return f"{condition.get('reason', 'failed')}: {condition.get('message', '')}"
    return ""


def _condition(status: JsonObject, kind: str) -> str:
    return next((each["status"] for each in status.get("conditions") or () if each["type"] == kind), "")


def _has_endpoint(api: KubernetesApi, service: JsonObject) -> bool:
    metadata = service["metadata"]
    slices = api.list("discovery.k8s.io/v1", "EndpointSlice", metadata["namespace"])
    own = [each for each in slices if each["metadata"]["labels"].get("kubernetes.io/service-name") == metadata["name"]]
    return any(point["conditions"].get("ready") for each in own for point in each.get("endpoints") or ())


def _pods(api: KubernetesApi, live: JsonObject) -> Iterator[str]:
    """Yield each pod of the object that is not ready, with the reasons of its containers."""
    wanted = (live.get("spec") or {}).get("selector") or {}
    labels = wanted.get("matchLabels", {}) if live.get("kind") != "Service" else wanted
    if not labels:
        return
    for pod in api.list("v1", "Pod", live["metadata"]["namespace"]):
        if labels.items() <= (pod["metadata"].get("labels") or {}).items() and (why := pod_problem(pod)):
            yield f"pod {pod['metadata']['name']}: {why}"


def pod_problem(pod: JsonObject) -> str:
    """Return why a pod is not ready, in Kubernetes' words; empty for a ready pod."""
    status = pod.get("status") or {}
    if _condition(status, "Ready") == "True" or status.get("phase") == "Succeeded":
        return ""
    reasons = [status.get("phase", "unknown")]
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        for what in ("waiting", "terminated"):
            state = (container.get("state") or {}).get(what) or {}
            if state and state.get("reason") not in ("Completed", "PodInitializing"):
                reasons.append(f"{container['name']} {what} {state.get('reason')} {state.get('message', '')}".strip())
    reasons += [each["message"] for each in status.get("conditions") or () if each.get("reason") == "Unschedulable"]
    return ", ".join(reasons)


def _warnings(api: KubernetesApi, namespace: str) -> Iterator[str]:
    """Yield the last warnings of a namespace, oldest first."""
    events = [each for each in api.list("v1", "Event", namespace) if each.get("type") == "Warning"]
    for event in sorted(events, key=lambda each: each.get("lastTimestamp") or each.get("eventTime") or "")[-_EVENTS:]:
        about = event["involvedObject"]
        yield f"{event['reason']} {about.get('kind')} {about.get('name')}: {event.get('message', '')}"
