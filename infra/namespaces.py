"""The two namespaces of a stack, and how much of the cluster each may take.

One holds the service, one the Ray clusters of batches. Kubernetes refuses every pod in them that is not of the
restricted profile (https://kubernetes.io/docs/concepts/security/pod-security-standards/).
"""

from dataclasses import dataclass
from typing import Any, Final

import pulumi
from pulumi_kubernetes import core, meta, scheduling

from infra.naming import StackNames

_SERVICE_QUOTA: Final = {
    "pods": "60",
    "requests.cpu": "32",
    "requests.memory": "96Gi",
    "persistentvolumeclaims": "20",
    # Traffic comes in by the ingress or not at all.
    "services.loadbalancers": "0",
    "services.nodeports": "0",
}
_DEFAULTS: Final[core.v1.LimitRangeItemArgsDict] = {
    "type": "Container",
    # For a container that says nothing: enough to start, too little to be forgotten.
    "default": {"cpu": "500m", "memory": "512Mi", "ephemeral-storage": "1Gi"},
    "default_request": {"cpu": "50m", "memory": "128Mi", "ephemeral-storage": "256Mi"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQuota:
    """The most that all jobs of the stack hold at the same time: CPUs, GiB of memory, GPUs."""

    cpus: int
    memory_gib: int
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespacesArgs:
    """The stack, what its jobs may take of the cluster, and whether the volumes outlive it (``keep_data``)."""

    names: StackNames
    job_quota: JobQuota
    keep_data: bool = True


class Namespaces(pulumi.ComponentResource):
    """The namespaces with their quotas and defaults, and the stack's priority classes."""

    made: tuple[pulumi.Resource, ...]
    service_priority: str
    jobs_priority: str

    def __init__(self, name: str, args: NamespacesArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:namespaces:Namespaces", name, None, opts)
        names = args.names
        self.service_priority = names.cluster_scoped("service")
        self.jobs_priority = names.cluster_scoped("jobs")
        # Deleting a namespace deletes the volume claims in it. Jobs have none: theirs goes, with every RayJob in it.
        service = self._namespace(names, names.service_namespace, _SERVICE_QUOTA, keep=args.keep_data)
        jobs = self._namespace(names, names.jobs_namespace, job_quota(args.job_quota), keep=False)
        priorities = (
            # Above jobs, so that a full cluster still takes requests; below everything of the cluster itself.
            self._priority(names, self.service_priority, 10_000, "The service of a batch stack"),
            self._priority(names, self.jobs_priority, 1_000, "Jobs of a batch stack"),
        )
        self.made = (*service, *jobs, *priorities)
        self.register_outputs({})

    def _namespace(
        self, names: StackNames, namespace: str, quota: dict[str, str], *, keep: bool
    ) -> tuple[pulumi.Resource, ...]:
        made = core.v1.Namespace(
            namespace,
            metadata=meta.v1.ObjectMetaArgs(name=namespace, labels=namespace_labels(names)),
            opts=pulumi.ResourceOptions(parent=self, protect=keep, retain_on_delete=keep),
        )
        inside = pulumi.ResourceOptions(parent=self, depends_on=[made])
        metadata = meta.v1.ObjectMetaArgs(name="stack", namespace=namespace, labels=names.labels("namespaces"))
        return (
            made,
            core.v1.ResourceQuota(f"{namespace}-quota", metadata=metadata, spec={"hard": quota}, opts=inside),
            core.v1.LimitRange(f"{namespace}-defaults", metadata=metadata, spec={"limits": [_DEFAULTS]}, opts=inside),
        )

    def _priority(self, names: StackNames, name: str, value: int, description: str) -> scheduling.v1.PriorityClass:
        return scheduling.v1.PriorityClass(
            name,
            metadata=meta.v1.ObjectMetaArgs(name=name, labels=names.labels("namespaces")),
            value=value,
            # A job that runs is not stopped for another.
            preemption_policy="Never",
            description=f"{description}: {names.instance}",
            opts=pulumi.ResourceOptions(parent=self),
        )


def namespace_labels(names: StackNames) -> dict[str, str]:
    """The labels of a namespace: the stack's own, and the profile that every pod in it must keep to."""
    modes = ("enforce", "audit", "warn")
    return names.labels("namespaces") | {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in modes}


def job_quota(quota: JobQuota) -> dict[str, Any]:
    """The ``hard`` part of the ResourceQuota of the jobs' namespace."""
    return {
        "requests.cpu": str(quota.cpus),
        "limits.cpu": str(quota.cpus),
        "requests.memory": f"{quota.memory_gib}Gi",
        "limits.memory": f"{quota.memory_gib}Gi",
        "requests.nvidia.com/gpu": str(quota.gpus),
        "services.loadbalancers": "0",
        "services.nodeports": "0",
    }
