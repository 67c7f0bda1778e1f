"""Temporary namespaces and pods of the checks, and Python in pods by kubectl."""

import json
import secrets
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ray_job.contract.cluster import POD_SECURITY_LABEL, POD_SECURITY_PROFILE
from service.doctor.cluster_api import ClusterApi, JsonObject
from service.doctor.findings import Finding
from service.doctor.preflight import probe
from service.errors import CloisterError

NAMESPACE_PREFIX: Final = "cloister-doctor-"
PORT: Final = 8000
"""The port at which each pod of the checks accepts connections."""
PROBE: Final = Path(probe.__file__).read_text(encoding="utf-8")

_LABEL: Final = "cloister.dev/doctor"
PULL_SECRET: Final = "doctor-pull"  # noqa: S105 - a name
_POLL_S: Final = 1.0
_EXEC_TIMEOUT_S: Final = 60.0
_ACCOUNT_LIMIT_S: Final = 30.0
_ACCOUNT_POLL_S: Final = 0.2
_MAX_REASON: Final = 300
# A pod ends by itself even if nobody deletes it.
_DEADLINE_S: Final = 7200
_UID: Final = 10001
_NO_PULL: Final = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName")
_NEVER_STARTS: Final = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


class PodError(CloisterError):
    """A pod of the checks does not run.

    Args:
        message: the state of the pod, with the message of Kubernetes.
        is_pull: whether the image could not be pulled.
    """

    def __init__(self, message: str, *, is_pull: bool = False) -> None:
        super().__init__(message)
        self.is_pull = is_pull


@dataclass(frozen=True, slots=True, kw_only=True)
class TestPod:
    """A pod that accepts connections on ``PORT`` and runs Python.

    Attributes:
        name: its name.
        image: its image, which has Python.
        labels: its labels.
        node: name of its node; empty for any.
        runtime_class: its RuntimeClass; empty for the default.
        gpu_resource: the extended resource of which it requests one; empty for none.
        claim: a volume claim that it mounts; empty for none.
        pull_secrets: names of its pull secrets.
    """

    __test__ = False  # pytest takes the name for a test

    name: str
    image: str
    labels: Mapping[str, str] = field(default_factory=dict)
    node: str = ""
    runtime_class: str = ""
    gpu_resource: str = ""
    claim: str = ""
    pull_secrets: tuple[str, ...] = ()

    def body(self) -> JsonObject:
        """Return the manifest, which the restricted profile admits."""
        amounts = {"cpu": "50m", "memory": "128Mi", "ephemeral-storage": "64Mi"}
        if self.gpu_resource:
            # torch with a CUDA context.
            amounts = {"cpu": "500m", "memory": "6Gi", "ephemeral-storage": "1Gi", self.gpu_resource: "1"}
        # Every namespace has this ConfigMap.
        authority = {"name": "kube-root-ca.crt", "optional": True}
        volumes: list[JsonObject] = [
            {"name": "tmp", "emptyDir": {}},
            {"name": "cluster-ca", "configMap": authority},
        ]
        mounts = [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a volume of the pod
            {"name": "cluster-ca", "mountPath": "/cluster-ca"},
        ]
        if self.claim:
            volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": self.claim}})
            mounts.append({"name": "data", "mountPath": "/data"})
        container = {
            "name": "main",
            "image": self.image,
            "command": ["python3", "-c", PROBE, "serve", str(PORT)],
            # torch writes caches, and names a directory after the user.
            "env": [{"name": "HOME", "value": "/tmp"}, {"name": "USER", "value": "cloister"}],  # noqa: S108
            "resources": {"requests": amounts, "limits": amounts},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            },
            "volumeMounts": mounts,
        }
        spec: JsonObject = {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _DEADLINE_S,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _UID,
                "runAsGroup": _UID,
                "fsGroup": _UID,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": volumes,
            "tolerations": [{"operator": "Exists"}] if self.node else [],
            "imagePullSecrets": [{"name": name} for name in self.pull_secrets],
        }
        if self.node:
            on_node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [self.node]}]}
            required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [on_node]}}
            spec["affinity"] = {"nodeAffinity": required}
        if self.runtime_class:
            spec["runtimeClassName"] = self.runtime_class
        metadata = {"name": self.name, "labels": {**self.labels, _LABEL: "true"}}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Access to a cluster with pods of the checks.

    Attributes:
        api: the Kubernetes API.
        kubectl: the command with kubeconfig and context.
        ended: set when the checks have to end, after Ctrl-C.
    """

    api: ClusterApi
    kubectl: Sequence[str]
    ended: threading.Event = field(default_factory=threading.Event)

    def start(self, namespace: str, pod: TestPod) -> None:
        """Create a pod.

        Raises:
            ClusterError: the API server refused it.
        """
        self.api.create(f"/api/v1/namespaces/{namespace}/pods", pod.body())

    def wait_until_running(self, namespace: str, name: str, *, limit_s: float) -> JsonObject:
        """Return a pod as soon as its container runs.

        Args:
            namespace: its namespace.
            name: its name.
            limit_s: the time limit, in seconds.

        Raises:
            PodError: it does not run in time, or never will.
        """
        end = time.monotonic() + limit_s
        while True:
            pod = self.api.read(f"/api/v1/namespaces/{namespace}/pods/{name}")
            if pod.get("status", {}).get("phase") == "Running":
                return pod
            problem = pod_error(pod)
            if problem.is_pull or pod.get("status", {}).get("phase") in {"Failed", "Succeeded"}:
                raise problem
            if time.monotonic() > end or self.ended.wait(_POLL_S):
                raise problem

    def python(self, namespace: str, pod: str, source: str, *arguments: str) -> Any:
        """Run a program in a pod, and return the JSON that it prints.

        Args:
            namespace: namespace of the pod.
            pod: its name.
            source: the program, which is sent on standard input.
            arguments: its arguments.

        Raises:
            PodError: kubectl or the program failed.
        """
        command = [*self.kubectl, "--namespace", namespace, "exec", "--stdin", pod, "--", "python3", "-", *arguments]
        try:
            done = subprocess.run(
                command, input=source, capture_output=True, text=True, timeout=_EXEC_TIMEOUT_S, check=False
            )
            return json.loads(done.stdout)
        except OSError as error:
            raise PodError(f"cannot run {command[0]}: {error.strerror}. Install kubectl") from error
        except subprocess.TimeoutExpired as error:
            raise PodError(f"`kubectl exec` in {namespace}/{pod} took longer than {_EXEC_TIMEOUT_S:.0f} s") from error
        except ValueError as error:
            reason = " ".join(done.stderr.split())[-_MAX_REASON:]
            raise PodError(f"`kubectl exec` in {namespace}/{pod} failed with {done.returncode}: {reason}") from error


def pod_error(pod: JsonObject) -> PodError:
    """Return why a pod does not run, from its state."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") in (*_NO_PULL, *_NEVER_STARTS):
            message = " ".join(str(waiting.get("message", "")).split())[:_MAX_REASON]
            is_pull = waiting["reason"] in _NO_PULL
            return PodError(f"pod {name}: {waiting['reason']}: {message}", is_pull=is_pull)
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            message = " ".join(str(condition.get("message", "")).split())[:_MAX_REASON]
            return PodError(f"pod {name} fits on no node: {message}")
    return PodError(f"pod {name} is {status.get('phase', 'Pending')}: {status.get('message') or 'no reason is given'}")


@contextmanager
def temporary_namespace(api: ClusterApi, *, purpose: str, docker_config: str = "") -> Iterator[str]:
    """Create a namespace with the restricted profile, and delete it afterwards, also after Ctrl-C.

    Args:
        api: the cluster.
        purpose: a word for its name.
        docker_config: content of the pull secret ``PULL_SECRET``; empty for none.

    Yields:
        Its name.
    """
    name = f"{NAMESPACE_PREFIX}{purpose}-{secrets.token_hex(3)}"
    labels = {POD_SECURITY_LABEL: POD_SECURITY_PROFILE, _LABEL: "true"}
    try:
        api.create(
            "/api/v1/namespaces",
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}},
        )
        if docker_config:
            secret = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": PULL_SECRET},
                "type": "kubernetes.io/dockerconfigjson",
                "stringData": {".dockerconfigjson": docker_config},
            }
            api.create(f"/api/v1/namespaces/{name}/secrets", secret)
        # No pod is admitted before the controller has created its account.
        end = time.monotonic() + _ACCOUNT_LIMIT_S
        while api.find(f"/api/v1/namespaces/{name}/serviceaccounts/default") is None and time.monotonic() < end:
            time.sleep(_ACCOUNT_POLL_S)
        yield name
    finally:
        api.delete(f"/api/v1/namespaces/{name}")


def check_leftovers(api: ClusterApi, jobs_namespace: str) -> Iterator[Finding]:
    """Report namespaces and pods that a doctor left behind when it was killed. One that runs now has them too.

    Args:
        api: the cluster.
        jobs_namespace: the namespace of the stack's jobs, where doctor starts pods too.
    """
    found = api.items("/api/v1/namespaces", labelSelector=f"{_LABEL}=true")
    names = [each["metadata"]["name"] for each in found if "deletionTimestamp" not in each["metadata"]]
    commands = [f"`kubectl delete namespace {' '.join(names)}`"] if names else []
    if api.items(f"/api/v1/namespaces/{jobs_namespace}/pods", labelSelector=f"{_LABEL}=true"):
        commands.append(f"`kubectl --namespace {jobs_namespace} delete pods --selector {_LABEL}=true`")
    if commands:
        yield Finding.warning(
            "temporary pods", f"another doctor runs, or was killed: {' and '.join(commands)} removes what it left"
        )
