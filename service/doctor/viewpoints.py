"""The viewpoints of ``cloister doctor``, and whether each can be taken from here."""

import os
import shlex
import shutil
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from ray_job.contract.cluster import API, RECONCILER
from service.doctor.findings import Finding, run_check
from service.doctor.pod import check_pod, relay
from service.errors import SettingsError

if TYPE_CHECKING:
    from service.doctor.preflight.choices import Preflight
    from service.doctor.preflight.stack_facts import StackFacts


class Viewpoint(StrEnum):
    """A place to run checks from."""

    CLUSTER = "cluster"
    POD = "pod"
    PREFLIGHT = "preflight"
    API = "api"


def look_from_cluster(
    kubeconfig: Path | None, context: str, *, namespace: str, storage_class: str
) -> Iterator[Finding]:
    """Check the cluster as the user of the kubeconfig. Without a kubeconfig and a context, no cluster is touched.

    Args:
        kubeconfig: the kubeconfig; None for $KUBECONFIG or ~/.kube/config.
        context: its context; empty for the current context.
        namespace: the service namespace of the stack; empty before there is a stack.
        storage_class: the storage class in the stack file; empty for the cluster's default.
    """
    if not (kubeconfig or context):
        yield Finding.not_checked("cluster", "no cluster is named: give --context, and --namespace if there is a stack")
        return
    try:
        from service.doctor.cluster import check_cluster
        from service.doctor.cluster_api import ClusterApi, open_kubeconfig
    except ModuleNotFoundError as error:
        yield Finding.failed("cluster", f"the package {error.name} is missing: install cloister[cluster]")
        return
    try:
        api = ClusterApi(open_kubeconfig(kubeconfig, context))
    except SettingsError as error:
        yield Finding.failed("kubeconfig", str(error))
        return
    yield from check_cluster(api, namespace=namespace, storage_class=storage_class)


def look_from_temporary_pods(
    kubeconfig: Path | None, context: str, facts: "StackFacts", preflight: "Preflight"
) -> Iterator[Finding]:
    """Check what only pods show, in temporary namespaces.

    Args:
        kubeconfig: the kubeconfig; None for $KUBECONFIG or ~/.kube/config.
        context: its context; empty for the current context.
        facts: values of the stack file.
        preflight: choices of the run.
    """
    try:
        from service.doctor.cluster_api import ClusterApi, open_kubeconfig
        from service.doctor.preflight.run import check_with_pods
    except ModuleNotFoundError as error:
        yield Finding.failed("preflight", f"the package {error.name} is missing: install cloister[cluster]")
        return
    command = _kubectl(kubeconfig, context)
    if not shutil.which(command[0]):
        yield Finding.not_checked("preflight", "kubectl is not on PATH: install it")
        return
    try:
        api = ClusterApi(open_kubeconfig(kubeconfig, context))
    except SettingsError as error:
        yield Finding.failed("kubeconfig", str(error))
        return
    yield from check_with_pods(api, facts, command, preflight)


def _kubectl(kubeconfig: Path | None, context: str) -> list[str]:
    return [
        "kubectl",
        *(["--kubeconfig", str(kubeconfig)] if kubeconfig else []),
        *(["--context", context] if context else []),
    ]


def look_from_pods(
    kubeconfig: Path | None, context: str, *, namespace: str, is_requested: bool
) -> Iterator[tuple[str, Iterator[Finding]]]:
    """Check the inside of the stack: here, or in its pods by kubectl if a cluster is named.

    Args:
        kubeconfig: the kubeconfig; None for $KUBECONFIG or ~/.kube/config.
        context: its context; empty for the current context.
        namespace: the service namespace of the stack; empty before there is a stack.
        is_requested: whether the user asks for this viewpoint, so that missing settings are an error.

    Yields:
        The place, such as ``in a pod of api``, and the findings from there.
    """
    here = "in a pod of the stack"
    if not (kubeconfig or context):
        if is_requested or os.environ.get("CLOISTER_OBJECT_STORE"):
            yield here, run_check("stack", check_pod, os.environ)
        else:
            reason = "no setting CLOISTER_… is set here, and no --context is given"
            yield here, iter([Finding.not_checked("stack", reason)])
    elif not namespace:
        yield here, iter([Finding.not_checked("stack", "no --namespace is given")])
    else:
        # Their policies and permissions differ.
        for deployment in (RECONCILER, API):
            # kubectl rather than the client library: an operator can run the same command by hand when it fails.
            command = [
                *_kubectl(kubeconfig, context),
                *["--namespace", namespace, "exec", f"deploy/{deployment}", "--container", deployment, "--"],
                *["cloister", "doctor", "--only", "pod", "--json"],
            ]
            place = f"in a pod of {deployment}"
            if shutil.which(command[0]):
                yield place, run_check("doctor in the pod", relay, command)
            else:
                reason = f"kubectl is not on PATH. Run: {shlex.join(command)}"
                yield place, iter([Finding.not_checked("stack", reason)])
