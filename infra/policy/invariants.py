"""The invariants and the checks that find violations, and the exceptions to them with their reasons."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from infra.policy import object_invariants, pod_invariants, stack_invariants
from infra.rendering.manifests import Manifest, with_templates


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A resource that violates an invariant."""

    invariant: str
    resource: str
    problem: str

    def __str__(self) -> str:
        return f"{self.resource}: {self.problem} ({self.invariant})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exemption:
    """A violation that is allowed.

    Attributes:
        invariant: name of the invariant.
        kind: kind of the resource.
        component: the resource's label ``app.kubernetes.io/component``.
        problem: a substring of the one problem that is allowed.
        reason: why it cannot be avoided.
    """

    invariant: str
    kind: str
    component: str
    problem: str
    reason: str


EXEMPTIONS: Final = (
    Exemption(
        invariant="nothing_of_the_host",
        kind="DaemonSet",
        component="device-plugin",
        problem="/var/lib/kubelet/device-plugins of the node",
        reason="a device plugin registers its devices with the kubelet through a socket in this directory",
    ),
    Exemption(
        invariant="restricted_security_context",
        kind="DaemonSet",
        component="device-plugin",
        problem="may run as root",
        reason="that directory belongs to root, so only root can create a socket in it",
    ),
)


INVARIANTS: Final[Mapping[str, str]] = {
    "images_by_digest": "Every image has a digest: a tag can move to other content.",
    "restricted_security_context": "Every pod follows the restricted profile of Kubernetes' pod security standards.",
    "read_only_root_file_system": "No container can change its own programs; it writes to volumes only.",
    "requests_and_limits": "Every container has requests and limits of CPU and memory.",
    "nothing_of_the_host": "No pod has access to its node's files, network or processes.",
    "no_secret_in_an_environment": "Secrets reach containers as files: pod descriptions, crash reports and child "
    "processes show an environment.",
    "no_credentials_in_ray_pods": "A container that runs Ray mounts no credential other than its job's token (head "
    "only) and the key of the http engine's endpoints; the program that copies weights ends before and has its own.",
    "gpus_on_request_only": "A container of a Ray cluster that requests no GPU exposes none, whatever its image says.",
    "probes_on_servers": "Every container that listens on a port has a readiness and a liveness probe.",
    "owner_labels": "Labels of every object and every pod name their stack and component.",
    "explicit_names": "Every object has a name and, unless it is cluster-scoped, a namespace other than `default`.",
    "operator_in_named_namespaces": "KubeRay's operator has roles in the namespaces that it watches, and no cluster "
    "role: that of its chart reads all Secrets.",
    "no_wildcard_rights": "A role lists its rights without wildcards, and no account is an administrator of the "
    "cluster.",
    "secrets_only_in_secrets": "Secret values are in Secrets only, and are secret in Pulumi's state.",
    "data_is_kept": "Objects that hold data are protected from deletion, and stay in the cluster after a destroy.",
    "no_open_flows": "A network policy, also one of Cilium or Calico, names the peers that it allows, and never allows "
    "all of them.",
    "reached_by_ingress_only": "No Service opens a port outside the cluster, an Ingress uses TLS for each of its "
    "hosts, and an HTTPRoute names its hosts and one listener of its Gateway.",
    "default_deny": "In every namespace of the stack, connections are denied unless another policy allows them.",
    "tokens_only_with_rights": "A pod has a token of the Kubernetes API only if its service account is bound to a role "
    "of the stack.",
    "limited_network_policies": "A role that may write network policies is limited by an admission policy: policies "
    "add up, so each could open any connection.",
    "disruption_budgets": "A workload with several replicas keeps at least one of them while nodes are drained, and "
    "allows the drain.",
    "unique_objects": "No two resources of a program are the same object.",
}
"""The statement of each invariant by name. The checks yield problems under these names."""

_MANIFEST_CHECKS: Final[tuple[Callable[[Manifest], pod_invariants.Problems], ...]] = (
    pod_invariants.image_problems,
    pod_invariants.pod_problems,
    pod_invariants.container_problems,
    pod_invariants.ray_problems,
    pod_invariants.gpu_problems,
    object_invariants.metadata_problems,
    object_invariants.right_problems,
    object_invariants.operator_problems,
    object_invariants.data_problems,
    object_invariants.network_problems,
    object_invariants.external_access_problems,
)
_STACK_CHECKS: Final[tuple[Callable[[Sequence[Manifest]], stack_invariants.StackProblems], ...]] = (
    stack_invariants.default_deny,
    stack_invariants.tokens_only_with_rights,
    stack_invariants.limited_network_policies,
    stack_invariants.disruption_budgets,
    stack_invariants.unique_objects,
)


def violations(given: Sequence[Manifest], *, exemptions: Sequence[Exemption] = EXEMPTIONS) -> tuple[Violation, ...]:
    """Return all violations in the manifests of a stack, and in the job templates inside its ConfigMaps.

    Args:
        given: all manifests of one stack.
        exemptions: violations to leave out.
    """
    manifests = with_templates(tuple(given))
    found = [
        (name, manifest, problem)
        for check in _MANIFEST_CHECKS
        for manifest in manifests
        for name, problem in check(manifest)
    ]
    for check_stack in _STACK_CHECKS:
        found += check_stack(manifests)
    return tuple(
        Violation(invariant=name, resource=manifest.title, problem=problem)
        for name, manifest, problem in found
        if not any(
            (exemption.invariant, exemption.kind) == (name, manifest.kind)
            and exemption.component == manifest.labels.get("app.kubernetes.io/component")
            and exemption.problem in problem
            for exemption in exemptions
        )
    )
