"""Outputs of a platform's stack that a customer's stack needs."""

from dataclasses import asdict, dataclass
from typing import Any

import pulumi

from infra.kubernetes.naming import StackNames
from infra.stack_file.cluster_sections import KubeRaySection, PlatformSection


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformOutputs:
    """Facts about a platform. None of them is secret.

    Attributes:
        kuberay_namespace: namespace of KubeRay's operator, which reads the status of jobs from Ray heads.
        jobs_namespaces: namespaces that the operator watches; empty if they are unknown.
    """

    kuberay_namespace: pulumi.Input[str]
    jobs_namespaces: pulumi.Input[list[str]]

    def exports(self) -> dict[str, Any]:
        """Return the outputs by name."""
        return asdict(self)


def expected_outputs(jobs_namespace: str) -> dict[str, Any]:
    """Return outputs of a platform that knows a customer, for programs that run without the platform's state.

    Args:
        jobs_namespace: namespace of the customer's jobs.
    """
    return PlatformOutputs(kuberay_namespace=KubeRaySection().namespace, jobs_namespaces=[jobs_namespace]).exports()


def platform_of(section: PlatformSection, names: StackNames) -> PlatformOutputs:
    """Return the platform of a customer's stack.

    Args:
        section: the section ``platform`` of the customer's stack file.
        names: names of the customer's stack.

    Raises:
        pulumi.RunError: the platform's stack lacks the customer; raised by the output.
    """
    if section.stack is None:
        return PlatformOutputs(kuberay_namespace=section.kuberay_namespace or "", jobs_namespaces=[])
    stack = pulumi.StackReference(section.stack)
    jobs_namespaces = stack.get_output("jobs_namespaces")

    def checked(outputs: tuple[str | None, list[str] | None]) -> str:
        namespace, watched = outputs
        if namespace is None or watched is None:
            raise pulumi.RunError(
                f"platform.stack: {section.stack} is not the stack of a platform, or has not been deployed; run "
                "`pulumi up` there"
            )
        if names.jobs_namespace not in watched:
            raise pulumi.RunError(
                f"platform.stack: {section.stack} does not know customer {names.customer}, environment "
                f"{names.environment}; add it to customers there, and run `pulumi up`"
            )
        return namespace

    namespace = pulumi.Output.all(stack.get_output("kuberay_namespace"), jobs_namespaces).apply(
        lambda found: checked((found[0], found[1]))
    )
    return PlatformOutputs(kuberay_namespace=namespace, jobs_namespaces=jobs_namespaces)
