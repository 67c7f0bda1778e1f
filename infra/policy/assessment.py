"""Assessment of a stack: which policies its resources meet, which they break, and which problems are accepted."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase, translate
from typing import Any, Final, Literal

from infra.policy import object_checks, pod_checks, setting_checks, stack_checks
from infra.policy.catalogue import BY_ID, BY_NAME, CATALOGUE, Policy
from infra.policy.facts import FACTS_TYPE, PolicyException, StackFacts, facts_of
from infra.rendering.manifests import Manifest, manifests, with_templates
from infra.rendering.recording import RecordedResource, Recording

Status = Literal["met", "not met", "excepted", "not applicable"]

_COMMANDS: Final = "command:"
_NOT_EXCEPTED: Final = frozenset({"secrets_encrypted_in_state"})
"""Policies without exceptions: a secret in plain text in the state is disclosed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A resource that breaks a policy."""

    policy: Policy
    resource: str
    problem: str

    def __str__(self) -> str:
        return f"{self.policy.id} {self.resource}: {self.problem}. {self.policy.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exemption:
    """A problem that every stack may have.

    Attributes:
        policy: name of the policy.
        kind: kind of the resource.
        component: the resource's label ``app.kubernetes.io/component``.
        problem: a substring of the one problem that is allowed.
        reason: why it cannot be avoided.
    """

    policy: str
    kind: str
    component: str
    problem: str
    reason: str


EXEMPTIONS: Final = (
    Exemption(
        policy="nothing_of_the_host",
        kind="DaemonSet",
        component="device-plugin",
        problem="/var/lib/kubelet/device-plugins of the node",
        reason="a device plugin registers its devices with the kubelet through a socket in this directory",
    ),
    Exemption(
        policy="no_root",
        kind="DaemonSet",
        component="device-plugin",
        problem="may run as root",
        reason="that directory belongs to root, so only root can create a socket in it",
    ),
    Exemption(
        policy="restricted_namespaces",
        kind="Namespace",
        component="device-plugin",
        problem="pod security of the component device-plugin",
        reason="the restricted standard refuses pods with a directory of their node; nothing else runs there",
    ),
)

_MANIFEST_CHECKS: Final[tuple[Callable[[Manifest], pod_checks.Problems], ...]] = (
    pod_checks.image_problems,
    pod_checks.pod_problems,
    pod_checks.container_problems,
    pod_checks.token_problems,
    pod_checks.job_problems,
    pod_checks.ray_problems,
    pod_checks.gpu_problems,
    object_checks.metadata_problems,
    object_checks.right_problems,
    object_checks.operator_problems,
    object_checks.admission_problems,
    object_checks.data_problems,
    object_checks.network_problems,
    object_checks.exposure_problems,
)
_STACK_CHECKS: Final[tuple[Callable[[Sequence[Manifest]], stack_checks.StackProblems], ...]] = (
    stack_checks.default_deny,
    stack_checks.tokens_only_with_rights,
    stack_checks.limited_network_policies,
    stack_checks.disruption_budgets,
    stack_checks.unique_objects,
    setting_checks.database_problems,
    setting_checks.object_store_problems,
    setting_checks.chart_problems,
    setting_checks.tracing_problems,
    setting_checks.model_problems,
    setting_checks.account_problems,
)
_FACT_CHECKS: Final[tuple[Callable[[Sequence[Manifest], StackFacts], stack_checks.StackProblems], ...]] = (
    setting_checks.service_problems,
    setting_checks.copy_problems,
    setting_checks.registry_problems,
    setting_checks.tenant_problems,
    setting_checks.fact_problems,
)


def violations(
    given: Sequence[Manifest],
    *,
    facts: StackFacts | None = None,
    commands: Sequence[Manifest] = (),
    exemptions: Sequence[Exemption] = EXEMPTIONS,
) -> tuple[Violation, ...]:
    """Return all violations in the manifests of a stack, and in the job templates inside its ConfigMaps.

    Args:
        given: all manifests of one stack.
        facts: what its stack file says; None without a stack.
        commands: its commands on hosts, in the form of manifests.
        exemptions: problems to leave out.
    """
    all_manifests = with_templates(tuple(given))
    found = [
        (name, manifest, problem)
        for check in _MANIFEST_CHECKS
        for manifest in all_manifests
        for name, problem in check(manifest)
    ]
    for check_stack in _STACK_CHECKS:
        found += check_stack(all_manifests)
    for check_facts in _FACT_CHECKS:
        found += check_facts(all_manifests, facts or StackFacts())
    found += setting_checks.connection_problems(commands)
    return tuple(
        Violation(policy=BY_NAME[name], resource=manifest.title, problem=problem)
        for name, manifest, problem in found
        if not any(_is_exempt(exemption, name, manifest, problem) for exemption in exemptions)
    )


def _is_exempt(exemption: Exemption, name: str, manifest: Manifest, problem: str) -> bool:
    component = manifest.labels.get("app.kubernetes.io/component")
    wanted = (exemption.policy, exemption.kind, exemption.component)
    return wanted == (name, manifest.kind, component) and exemption.problem in problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A field of a resource that shows a policy. A secret value is None."""

    kind: str
    resource: str
    path: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Assessment of one policy.

    Attributes:
        policy: the policy.
        violations: problems that nobody has accepted.
        accepted: problems that an exception covers, each with it.
        proofs: fields that show the policy.
    """

    policy: Policy
    violations: tuple[Violation, ...]
    accepted: tuple[tuple[Violation, PolicyException], ...]
    proofs: tuple[Proof, ...]

    @property
    def status(self) -> Status:
        """Status for people: ``excepted`` if all problems are accepted."""
        if self.violations:
            return "not met"
        if self.accepted:
            return "excepted"
        return "met" if self.proofs else "not applicable"


def assess(recording: Recording, *, today: date) -> tuple[Result, ...]:
    """Assess all policies of a stack, in the order of the catalogue.

    Args:
        recording: the resources of the stack.
        today: the day, in UTC; an exception that expired before covers nothing.
    """
    found = judged(recording, today=today)
    fields = [(f"{proof.kind}:{proof.path}", proof) for proof in fields_of(recording)]
    return tuple(
        Result(
            policy=policy,
            violations=tuple(each for each, exception in found if each.policy is policy and exception is None),
            accepted=tuple((each, exception) for each, exception in found if each.policy is policy and exception),
            proofs=_matching(policy.proof, fields),
        )
        for policy in CATALOGUE
    )


def refusals(recording: Recording, *, today: date) -> tuple[str, ...]:
    """Return why a stack is refused, one line each: mandatory policies that it breaks, and exceptions that are wrong.

    Args:
        recording: the resources that the program would register.
        today: the day, in UTC.
    """
    lines = list(exception_problems(facts_of(recording.resources).exceptions, today=today))
    lines += [
        str(violation)
        for violation, exception in judged(recording, today=today)
        if exception is None and violation.policy.severity == "mandatory"
    ]
    return tuple(dict.fromkeys(lines))


def judged(recording: Recording, *, today: date) -> list[tuple[Violation, PolicyException | None]]:
    """Return the violations of a stack, each with the exception that covers it."""
    facts = facts_of(recording.resources)
    found = violations(manifests(recording), facts=facts, commands=list(_commands(recording.resources)))
    valid = [each for each in facts.exceptions if each.expires is None or each.expires >= today]

    def covers(exception: PolicyException, violation: Violation) -> bool:
        is_same = exception.policy == violation.policy.id and violation.policy.name not in _NOT_EXCEPTED
        return is_same and fnmatchcase(violation.resource, exception.resource)

    return [(each, next((exception for exception in valid if covers(exception, each)), None)) for each in found]


def exception_problems(exceptions: Sequence[PolicyException], *, today: date) -> Iterator[str]:
    """Yield what is wrong with the exceptions of a stack file, as ``key: what is wrong; what to do``."""
    for each in exceptions:
        if each.policy not in BY_ID:
            yield f"policy.exceptions: there is no policy {each.policy}; docs/policies.md lists them"
        elif BY_ID[each.policy].name in _NOT_EXCEPTED:
            yield f"policy.exceptions: {each.policy} has no exceptions; {BY_ID[each.policy].remedy}"
        if each.expires and each.expires < today:
            yield (
                f"policy.exceptions: the exception to {each.policy} for {each.resource} expired on {each.expires}; "
                f"correct the resource, or agree on a new date with {each.owner}"
            )


def refusal_text(lines: Sequence[str], *, stack: str) -> str:
    """Return the message for a stack that is refused."""
    shown = "".join(f"\n  {line}" for line in lines)
    return f"the stack {stack} breaks its policies (docs/policies.md), so nothing was changed:{shown}"


def _commands(resources: Sequence[RecordedResource]) -> Iterator[Manifest]:
    """Yield commands on hosts in the form of manifests with the host's key, unless the state hides the connection."""
    for resource in resources:
        connection = resource.inputs.get("connection")
        if resource.type.startswith(_COMMANDS) and isinstance(connection, Mapping):
            host_key = {"hostKey": connection.get("hostKey") or ""}
            yield Manifest(body={"kind": "Command", "metadata": {"name": resource.name}, "connection": host_key})


def _matching(patterns: Sequence[str], fields: Sequence[tuple[str, Proof]]) -> tuple[Proof, ...]:
    matches = re.compile("|".join(map(translate, patterns))).match
    return tuple(proof for place, proof in fields if matches(place))


def fields_of(recording: Recording) -> Iterator[Proof]:
    """Yield every field of the objects and facts of a stack. Items of lists with a name have it in their path."""
    for manifest in with_templates((*manifests(recording), *_commands(recording.resources))):
        body = manifest.body | {"protected": manifest.protected, "kept": manifest.kept}
        # Values of a Secret are hidden even if they are in plain text by mistake.
        secrets = manifest.secrets | ({("data",), ("stringData",)} if manifest.kind == "Secret" else frozenset())
        for path, value in _leaves(body, (), secrets, ()):
            yield Proof(kind=manifest.kind, resource=manifest.title, path=path, value=value)
    for resource in recording.resources:
        if resource.type == FACTS_TYPE:
            for path, value in _leaves(resource.inputs, (), frozenset(), ()):
                yield Proof(kind="StackFacts", resource="stack file", path=path, value=value)


def _leaves(
    value: Any, path: tuple[str | int, ...], secrets: frozenset[tuple[str | int, ...]], shown: tuple[str, ...]
) -> Iterator[tuple[str, Any]]:
    if path in secrets:
        yield ".".join(shown), None
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key), secrets, (*shown, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            name = item.get("name") if isinstance(item, Mapping) else None
            yield from _leaves(item, (*path, index), secrets, (*shown, str(name or index)))
    else:
        yield ".".join(shown), value
