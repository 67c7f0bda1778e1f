"""Who may ask the Kubernetes API for what: the service accounts of the stack, and the one role that there is.

The reconciler runs batches as RayJobs, and that is all that it can do. API, migrations and the pods of jobs have
accounts without a token. Nothing has a cluster role. KubeRay's operator gives each Ray cluster's autoscaler an account
with a role of its own, which reads and patches pods and Ray clusters of the namespace of jobs.
"""

from dataclasses import dataclass
from typing import Final

import pulumi
from pulumi_kubernetes import core, meta, rbac

from infra.naming import StackNames

API: Final = "api"
RECONCILER: Final = "reconciler"
MIGRATIONS: Final = "migrations"
ACCOUNTS: Final = (API, RECONCILER, MIGRATIONS)

LAUNCHER_RULES: Final[tuple[rbac.v1.PolicyRuleArgsDict, ...]] = (
    # create and delete: one RayJob for each attempt of a batch. The others: what became of it.
    {"api_groups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["create", "get", "list", "watch", "delete"]},
    # Why a job does not start yet stands in its waiting pods: no such image, no free GPU.
    {"api_groups": [""], "resources": ["pods"], "verbs": ["list"]},
)
"""What ``service.adapters.rayjobs_api`` asks of the API server, in the namespace of jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessArgs:
    """The stack whose accounts these are."""

    names: StackNames


class Access(pulumi.ComponentResource):
    """Service accounts of the service's namespace, and the launcher's role in the namespace of jobs."""

    made: tuple[pulumi.Resource, ...]

    def __init__(self, name: str, args: AccessArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:access:Access", name, None, opts)
        accounts = tuple(self._account(args.names, account) for account in ACCOUNTS)
        role = rbac.v1.Role(
            "launcher",
            metadata=_metadata(args.names, "launcher", args.names.jobs_namespace),
            rules=list(LAUNCHER_RULES),
            opts=pulumi.ResourceOptions(parent=self),
        )
        binding = rbac.v1.RoleBinding(
            "launcher",
            metadata=_metadata(args.names, "launcher", args.names.jobs_namespace),
            role_ref={"api_group": "rbac.authorization.k8s.io", "kind": "Role", "name": "launcher"},
            subjects=[{"kind": "ServiceAccount", "name": RECONCILER, "namespace": args.names.service_namespace}],
            opts=pulumi.ResourceOptions(parent=self, depends_on=[role]),
        )
        self.made = (*accounts, role, binding)
        self.register_outputs({})

    def _account(self, names: StackNames, account: str) -> core.v1.ServiceAccount:
        return core.v1.ServiceAccount(
            account,
            metadata=_metadata(names, account, names.service_namespace),
            # The one pod that needs a token mounts it itself.
            automount_service_account_token=False,
            opts=pulumi.ResourceOptions(parent=self),
        )


def _metadata(names: StackNames, name: str, namespace: str) -> meta.v1.ObjectMetaArgs:
    return meta.v1.ObjectMetaArgs(name=name, namespace=namespace, labels=names.labels("access"))
