"""The two namespaces of a stack, and their quotas.

One namespace holds the service, the other the Ray clusters of jobs. Kubernetes rejects every pod in them that
violates the restricted profile (https://kubernetes.io/docs/concepts/security/pod-security-standards/).
"""

from collections.abc import Mapping
from typing import Any, Final

import pulumi
from pulumi_kubernetes import core, meta, scheduling

from infra.kubernetes.kept_data import DataProtection
from infra.kubernetes.naming import StackNames
from ray_job.contract.cluster import POD_SECURITY_PROFILE

# Clients reach the stack through the ingress only.
_NO_OPEN_SERVICES: Final = {"services.loadbalancers": "0", "services.nodeports": "0"}
_SERVICE_QUOTA: Final = {
    "pods": "60",
    "requests.cpu": "32",
    "requests.memory": "96Gi",
    "persistentvolumeclaims": "20",
    **_NO_OPEN_SERVICES,
}
_DEFAULTS: Final[core.v1.LimitRangeItemArgsDict] = {
    "type": "Container",
    # For a container without requests and limits: enough to start, too little to go unnoticed.
    "default": {"cpu": "500m", "memory": "512Mi", "ephemeral-storage": "1Gi"},
    "default_request": {"cpu": "50m", "memory": "128Mi", "ephemeral-storage": "256Mi"},
}


def pod_security_labels(profile: str) -> dict[str, str]:
    """Return the labels of a namespace that enforce a profile, and warn of pods that violate it."""
    return {f"pod-security.kubernetes.io/{mode}": profile for mode in ("enforce", "audit", "warn")}


class Namespaces(pulumi.ComponentResource):
    """The namespaces with their quotas and defaults, and the stack's priority classes.

    Args:
        name: logical name of the component.
        names: names of the stack.
        job_quota: quota of the jobs' namespace, by resource.
        protection: protection of the data in the service's namespace.
        has_platform: whether the platform's stack creates the jobs' namespace.
        opts: options of the component.
    """

    resources: tuple[pulumi.Resource, ...]
    service_priority: str
    jobs_priority: str

    def __init__(
        self,
        name: str,
        *,
        names: StackNames,
        job_quota: Mapping[str, str],
        protection: DataProtection,
        has_platform: bool = False,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("cloister:namespaces:Namespaces", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        self.service_priority = names.cluster_scoped("service")
        self.jobs_priority = names.cluster_scoped("jobs")
        jobs_quota = {**job_quota, **_NO_OPEN_SERVICES}
        priorities = (
            # Above jobs, so that a full cluster still accepts requests; below the cluster's own components.
            (self.service_priority, 10_000, "The service of a batch stack"),
            (self.jobs_priority, 1_000, "Jobs of a batch stack"),
        )
        self.resources = (
            # The deletion of a namespace deletes the volume claims in it. The jobs' namespace has none: it is deleted
            # with all RayJobs in it.
            *self._namespace(names, names.service_namespace, _SERVICE_QUOTA, protection.options(self)),
            *self._namespace(names, names.jobs_namespace, jobs_quota, None if has_platform else child),
            *(
                scheduling.v1.PriorityClass(
                    priority,
                    metadata=meta.v1.ObjectMetaArgs(name=priority, labels=names.labels("namespaces")),
                    value=value,
                    # A running job is never stopped to start another pod.
                    preemption_policy="Never",
                    description=f"{description}: {names.instance}",
                    opts=child,
                )
                for priority, value, description in priorities
            ),
        )
        self.register_outputs({})

    def _namespace(
        self, names: StackNames, namespace: str, quota: dict[str, Any], opts: pulumi.ResourceOptions | None
    ) -> tuple[pulumi.Resource, ...]:
        labels = names.labels("namespaces")
        created: tuple[pulumi.Resource, ...] = ()
        if opts is not None:
            secured = meta.v1.ObjectMetaArgs(name=namespace, labels=labels | pod_security_labels(POD_SECURITY_PROFILE))
            created = (core.v1.Namespace(namespace, metadata=secured, opts=opts),)
        inside = pulumi.ResourceOptions(parent=self, depends_on=list(created))
        metadata = meta.v1.ObjectMetaArgs(name="stack", namespace=namespace, labels=labels)
        return (
            *created,
            core.v1.ResourceQuota(f"{namespace}-quota", metadata=metadata, spec={"hard": quota}, opts=inside),
            core.v1.LimitRange(f"{namespace}-defaults", metadata=metadata, spec={"limits": [_DEFAULTS]}, opts=inside),
        )
