"""Customers of a platform: the namespaces of their jobs, and the register that keeps both from being deleted.

The platform creates the namespace of each customer's jobs, because KubeRay's operator needs its rights in it before it
watches it: an operator that cannot list RayJobs in one namespace restarts every two minutes, for all customers
(``CacheSyncTimeout`` of https://pkg.go.dev/sigs.k8s.io/controller-runtime/pkg/controller). The customer's stack creates
everything in the namespace, and registers itself: one key of the ConfigMap ``customers``.

Two admission policies protect the registered customers. The ConfigMap depends on all other resources of the platform,
so `pulumi destroy` deletes it first, and is refused before anything is deleted. The namespace of a registered customer
cannot be deleted, so a customer that is removed from the stack file too early loses nothing.
"""

from collections.abc import Sequence
from typing import Any, Final

import pulumi
from pulumi_kubernetes import admissionregistration, core, meta, networking

from infra.kubernetes.naming import PLATFORM, StackNames
from infra.shared_platform.namespace import platform_namespace
from infra.tenancy.namespaces import pod_security_labels
from ray_job.contract.cluster import POD_SECURITY_PROFILE

NAMESPACE: Final = "cloister-platform"
REGISTER: Final = "customers"
COMPONENT: Final = "customers"
# The customer's stack creates the policy `default-deny`.
_DENY: Final = "platform-default-deny"
_REGISTERED: Final = "destroy the stacks of the customers first, then change the platform"


class JobsNamespaces(pulumi.ComponentResource):
    """The namespace of the jobs of each customer, which denies all connections.

    Args:
        name: logical name of the component.
        customers: names of the customers' stacks.
        opts: options of the component.
    """

    resources: tuple[pulumi.Resource, ...]

    def __init__(self, name: str, customers: Sequence[StackNames], opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:customers:JobsNamespaces", name, None, opts)
        resources: list[pulumi.Resource] = []
        for names in customers:
            labels, jobs = names.labels(COMPONENT), names.jobs_namespace
            created = core.v1.Namespace(
                jobs,
                metadata=meta.v1.ObjectMetaArgs(name=jobs, labels=labels | pod_security_labels(POD_SECURITY_PROFILE)),
                opts=pulumi.ResourceOptions(parent=self),
            )
            spec: Any = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"], "ingress": [], "egress": []}
            denied = networking.v1.NetworkPolicy(
                f"{jobs}-{_DENY}",
                metadata=meta.v1.ObjectMetaArgs(name=_DENY, namespace=jobs, labels=labels),
                spec=spec,
                opts=pulumi.ResourceOptions(parent=self, depends_on=[created]),
            )
            resources += [created, denied]
        self.resources = tuple(resources)
        self.register_outputs({})


def register_policy() -> dict[str, Any]:
    """Return the ``spec`` of the policy that keeps the register while a customer is in it."""
    is_register = f"oldObject.metadata.namespace == '{NAMESPACE}' && oldObject.metadata.name == '{REGISTER}'"
    return {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [_deletion("configmaps")]},
        "matchConditions": [{"name": REGISTER, "expression": is_register}],
        "validations": [
            {
                "expression": "!has(oldObject.data) || oldObject.data.size() == 0",
                "message": f"customers use this platform; {_REGISTERED}",
                "messageExpression": "oldObject.data.map(name, oldObject.data[name]).join(', ') "
                f"+ ' use this platform; {_REGISTERED}'",
            }
        ],
    }


def namespace_policy() -> dict[str, Any]:
    """Return the ``spec`` of the policy that keeps the namespaces whose names are keys of the register."""
    return {
        "failurePolicy": "Fail",
        "paramKind": {"apiVersion": "v1", "kind": "ConfigMap"},
        "matchConstraints": {"resourceRules": [_deletion("namespaces")]},
        "validations": [
            {
                "expression": "!has(params.data) || !(oldObject.metadata.name in params.data)",
                "message": f"it runs the jobs of a customer that uses this platform; {_REGISTERED}",
            }
        ],
    }


class CustomerRegister(pulumi.ComponentResource):
    """The register and its policies.

    Args:
        name: logical name of the component.
        platform: all other resources of the platform.
        opts: options of the component.
    """

    def __init__(
        self, name: str, platform: Sequence[pulumi.Resource], opts: pulumi.ResourceOptions | None = None
    ) -> None:
        super().__init__("cloister:customers:CustomerRegister", name, None, opts)
        labels = PLATFORM.labels(COMPONENT)
        before: list[pulumi.Resource] = platform_namespace(
            NAMESPACE, names=PLATFORM, component=COMPONENT, profile="restricted", docker_config=None, parent=self
        )
        register = {"name": REGISTER, "namespace": NAMESPACE, "parameterNotFoundAction": "Allow"}
        policies: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
            ("register", register_policy(), {}),
            ("jobs-namespaces", namespace_policy(), {"paramRef": register}),
        )
        for policy, spec, reference in policies:
            metadata = meta.v1.ObjectMetaArgs(name=f"{NAMESPACE}-{policy}", labels=labels)
            binding: Any = {"policyName": f"{NAMESPACE}-{policy}", "validationActions": ["Deny"], **reference}
            arguments: Any = spec
            child = pulumi.ResourceOptions(parent=self)
            before += [
                admissionregistration.v1.ValidatingAdmissionPolicy(
                    policy, metadata=metadata, spec=arguments, opts=child
                ),
                admissionregistration.v1.ValidatingAdmissionPolicyBinding(
                    policy, metadata=metadata, spec=binding, opts=child
                ),
            ]
        core.v1.ConfigMap(
            REGISTER,
            # Its data belongs to the customers' stacks.
            metadata=meta.v1.ObjectMetaArgs(name=REGISTER, namespace=NAMESPACE, labels=labels),
            opts=pulumi.ResourceOptions(parent=self, depends_on=[*platform, *before]),
        )
        self.register_outputs({})


class Registration(pulumi.ComponentResource):
    """The key of one customer's stack in the register. All other resources of the stack depend on it.

    Args:
        name: logical name of the component.
        names: names of the stack.
        opts: options of the component.
    """

    resources: tuple[pulumi.Resource, ...]

    def __init__(self, name: str, names: StackNames, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:customers:Registration", name, None, opts)
        key = core.v1.ConfigMapPatch(
            REGISTER,
            # Without an annotation that names a field manager: the annotation itself would be a field of all customers.
            metadata=meta.v1.ObjectMetaPatchArgs(name=REGISTER, namespace=NAMESPACE),
            data={names.jobs_namespace: names.instance},
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.resources = (key,)
        self.register_outputs({})


def _deletion(resource: str) -> dict[str, Any]:
    return {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["DELETE"], "resources": [resource]}
