"""Limit of the network policies that the reconciler may create: each lets the pods of one job reach each other.

The launcher creates one such policy for each job, because the pods of a job are not known before. Network policies add
up, so the right to create them could open any connection. The API server therefore refuses all others from the
reconciler (https://kubernetes.io/docs/reference/access-authn-authz/validating-admission-policy/).
"""

from typing import Any, Final

import pulumi
from pulumi_kubernetes import admissionregistration, meta

from infra.kubernetes.naming import StackNames
from ray_job.contract.cluster import RECONCILER
from ray_job.contract.rayjobs import JOB_LABEL

_OWN_PODS: Final = (
    "has(peer.podSelector) && !has(peer.namespaceSelector) && !has(peer.ipBlock) "
    "&& peer.podSelector == object.spec.podSelector"
)
_VALIDATIONS: Final = (
    (
        (
            "has(object.spec.podSelector.matchLabels) && !has(object.spec.podSelector.matchExpressions) "
            "&& object.spec.podSelector.matchLabels.size() == 1 "
            f"&& '{JOB_LABEL}' in object.spec.podSelector.matchLabels"
        ),
        f"the policy must select pods by the label {JOB_LABEL} only",
    ),
    *(
        (
            (
                f"!has(object.spec.{direction}) || object.spec.{direction}.all(rule, has(rule.{side}) "
                f"&& rule.{side}.size() > 0 && rule.{side}.all(peer, {_OWN_PODS}))"
            ),
            f"the policy must allow {direction} {side} the pods that it selects only",
        )
        for direction, side in (("ingress", "from"), ("egress", "to"))
    ),
    (
        (
            "has(object.metadata.ownerReferences) && object.metadata.ownerReferences.size() == 1 "
            "&& object.metadata.ownerReferences[0].kind == 'RayJob'"
        ),
        "the policy must belong to a RayJob, so that it is deleted with the job",
    ),
)


def admission_policy(names: StackNames) -> dict[str, Any]:
    """Return the ``spec`` of the policy: which requests it checks, and with which expressions (CEL)."""
    account = f"system:serviceaccount:{names.service_namespace}:{RECONCILER}"
    return {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "resourceRules": [
                {
                    "apiGroups": ["networking.k8s.io"],
                    "apiVersions": ["v1"],
                    "operations": ["CREATE", "UPDATE"],
                    "resources": ["networkpolicies"],
                }
            ]
        },
        "matchConditions": [{"name": RECONCILER, "expression": f"request.userInfo.username == '{account}'"}],
        "validations": [{"expression": expression, "message": message} for expression, message in _VALIDATIONS],
    }


class JobNetworks(pulumi.ComponentResource):
    """The admission policy and its binding to the jobs' namespace. The launcher's role must not exist before them."""

    resources: tuple[pulumi.Resource, ...]

    def __init__(self, name: str, names: StackNames, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:network:JobNetworks", name, None, opts)
        metadata = meta.v1.ObjectMetaArgs(name=names.cluster_scoped("job-networks"), labels=names.labels("network"))
        spec: Any = admission_policy(names)
        child = pulumi.ResourceOptions(parent=self)
        policy = admissionregistration.v1.ValidatingAdmissionPolicy(
            "job-networks", metadata=metadata, spec=spec, opts=child
        )
        binding: Any = {
            "policyName": names.cluster_scoped("job-networks"),
            "validationActions": ["Deny"],
            "matchResources": {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": names.jobs_namespace}}
            },
        }
        self.resources = (
            policy,
            admissionregistration.v1.ValidatingAdmissionPolicyBinding(
                "job-networks", metadata=metadata, spec=binding, opts=child
            ),
        )
        self.register_outputs({})
