"""Service accounts of a stack, the one role among them, and the owner of the RayJobs that it allows.

The reconciler runs jobs as RayJobs, and its role allows that and nothing else; ``infra.tenancy.job_networks`` limits
the network policies that it may create. API, coordinator, migrations, the export of the audit log and the pods of jobs
have accounts without a token. No account has a cluster role. For each Ray cluster, KubeRay's operator creates an
account for the autoscaler with a role that can read and patch pods and Ray clusters in the jobs' namespace.
"""

from typing import Final

import pulumi
from pulumi_kubernetes import core, meta, rbac

from infra.kubernetes.naming import StackNames
from ray_job.contract.cluster import API, COORDINATOR, JOBS_OWNER, LAUNCHER_RIGHTS, RECONCILER

MIGRATIONS: Final = "migrations"
AUDIT_EXPORT: Final = "audit-export"
SERVICE_ACCOUNTS: Final = (API, RECONCILER, COORDINATOR, MIGRATIONS, AUDIT_EXPORT)


class Rbac(pulumi.ComponentResource):
    """Service accounts in the service's namespace; the launcher's role and the RayJobs' owner in that of the jobs."""

    resources: tuple[pulumi.Resource, ...]

    def __init__(self, name: str, names: StackNames, opts: pulumi.ResourceOptions | None = None) -> None:
        # The type token is older than the class name. A stored state file finds the resources by it.
        super().__init__("cloister:access:Access", name, None, opts)
        service_namespace, jobs_namespace = names.service_namespace, names.jobs_namespace
        labels = names.labels("access")
        accounts = tuple(
            core.v1.ServiceAccount(
                account,
                metadata=meta.v1.ObjectMetaArgs(name=account, namespace=service_namespace, labels=labels),
                # The reconciler's pod, the only one that needs a token, mounts it itself.
                automount_service_account_token=False,
                opts=pulumi.ResourceOptions(parent=self),
            )
            for account in SERVICE_ACCOUNTS
        )
        launcher = meta.v1.ObjectMetaArgs(name="launcher", namespace=jobs_namespace, labels=labels)
        role = rbac.v1.Role(
            "launcher",
            metadata=launcher,
            rules=[
                {
                    "api_groups": [right.group],
                    "resources": [right.resource],
                    "verbs": list(right.verbs),
                    **({"resource_names": list(right.names)} if right.names else {}),
                }
                for right in LAUNCHER_RIGHTS
            ],
            opts=pulumi.ResourceOptions(parent=self),
        )
        binding = rbac.v1.RoleBinding(
            "launcher",
            metadata=launcher,
            role_ref={"api_group": "rbac.authorization.k8s.io", "kind": "Role", "name": "launcher"},
            subjects=[{"kind": "ServiceAccount", "name": RECONCILER, "namespace": service_namespace}],
            opts=pulumi.ResourceOptions(parent=self, depends_on=[role]),
        )
        # The operator needs its rights, and the pods their policies, until the RayJobs have ended.
        owner = core.v1.ConfigMap(
            JOBS_OWNER,
            metadata=meta.v1.ObjectMetaArgs(
                name=JOBS_OWNER,
                namespace=jobs_namespace,
                labels=labels,
                annotations={"pulumi.com/deletionPropagationPolicy": "foreground"},
            ),
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.resources = (*accounts, role, binding, owner)
        self.register_outputs({})
