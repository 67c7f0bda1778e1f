"""All invariants by name, the named exceptions with their reasons, and how they are asked."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from infra.manifests import Manifest, with_templates
from infra.policy import object_invariants, pod_invariants, stack_invariants

OneManifest = Callable[[Manifest], Iterator[str]]
AllManifests = Callable[[Sequence[Manifest]], Iterator[tuple[Manifest, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariant:
    """Something that holds for all resources.

    Attributes:
        name: of the function that checks it.
        meaning: one sentence.
        check: gives each manifest that breaks it, with what is wrong.
    """

    name: str
    meaning: str
    check: AllManifests


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One resource that breaks one invariant."""

    invariant: str
    resource: str
    problem: str

    def __str__(self) -> str:
        return f"{self.resource}: {self.problem} ({self.invariant})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exemption:
    """A resource for which an invariant need not hold.

    Attributes:
        invariant: its name.
        kind: of the resource.
        component: its label ``app.kubernetes.io/component``.
        problem: the one problem that is allowed; a part of its text.
        reason: why it has to be.
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
        reason="a device plugin tells the kubelet of its devices through a socket in this directory",
    ),
    Exemption(
        invariant="restricted_security_context",
        kind="DaemonSet",
        component="device-plugin",
        problem="may run as root",
        reason="that directory belongs to root, and nobody else may open a socket in it",
    ),
)


def _each(check: OneManifest) -> AllManifests:
    def all_manifests(manifests: Sequence[Manifest]) -> Iterator[tuple[Manifest, str]]:
        for manifest in manifests:
            for problem in check(manifest):
                yield manifest, problem

    return all_manifests


def _invariant(check: OneManifest | AllManifests, asked: AllManifests) -> Invariant:
    return Invariant(name=check.__name__, meaning=(check.__doc__ or "").strip(), check=asked)


_OF_ONE: Final[tuple[OneManifest, ...]] = (
    pod_invariants.images_by_digest,
    pod_invariants.restricted_security_context,
    pod_invariants.read_only_root_file_system,
    pod_invariants.requests_and_limits,
    pod_invariants.nothing_of_the_host,
    pod_invariants.no_secret_in_an_environment,
    pod_invariants.probes_on_servers,
    object_invariants.owner_labels,
    object_invariants.explicit_names,
    object_invariants.no_wildcard_rights,
    object_invariants.secrets_only_in_secrets,
    object_invariants.data_is_kept,
    object_invariants.no_open_flows,
    object_invariants.reached_by_ingress_only,
)
_OF_ALL: Final[tuple[AllManifests, ...]] = (
    stack_invariants.default_deny,
    stack_invariants.tokens_only_with_rights,
    stack_invariants.disruption_budgets,
    stack_invariants.unique_objects,
)

INVARIANTS: Final = (
    *(_invariant(check, _each(check)) for check in _OF_ONE),
    *(_invariant(check, check) for check in _OF_ALL),
)


def violations(given: Sequence[Manifest], *, exemptions: Sequence[Exemption] = EXEMPTIONS) -> tuple[Violation, ...]:
    """Everything that is wrong with the manifests of a stack, and with the templates inside of them.

    Args:
        given: all manifests of one stack.
        exemptions: what is not told.
    """
    manifests = with_templates(tuple(given))
    return tuple(
        Violation(invariant=invariant.name, resource=manifest.title, problem=problem)
        for invariant in INVARIANTS
        for manifest, problem in invariant.check(manifests)
        if not any(_exempt(exemption, invariant, manifest, problem) for exemption in exemptions)
    )


def _exempt(exemption: Exemption, invariant: Invariant, manifest: Manifest, problem: str) -> bool:
    return (
        exemption.invariant == invariant.name
        and exemption.kind == manifest.kind
        and exemption.component == manifest.labels.get("app.kubernetes.io/component")
        and exemption.problem in problem
    )
