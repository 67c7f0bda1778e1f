"""Section of a stack file about policies: what it approves, and exceptions."""

from datetime import date
from typing import Annotated

from pydantic import AfterValidator, Field

from infra.stack_file.values import Registry, matching
from service.config_sections import Section, key


def check_day(value: str) -> str:
    """Check a calendar day. Pulumi adds a time to a day without quotes, which is removed."""
    day = value.removesuffix("T00:00:00Z")
    try:
        return date.fromisoformat(day).isoformat()
    except ValueError as error:
        raise ValueError("must be a day, e.g. 2030-01-31") from error


class PolicyExceptionSection(Section):
    """A decision to accept what breaks a policy, until a day. The evidence shows it."""

    policy: Annotated[
        str, AfterValidator(matching(r"CLO-[A-Z]+-\d{3}", "must be the id of a policy, e.g. CLO-IMG-002"))
    ] = key("id of the policy (docs/policies.md)", "CLO-IMG-002")
    resource: Annotated[str, Field(min_length=1)] = key(
        "kind, namespace and name of the resource as messages show it; `*` stands for any text",
        "Deployment cloister-acme-prod/*",
    )
    reason: Annotated[str, Field(min_length=1)] = key("why it is accepted", "the mirror is moved in March")
    owner: Annotated[str, Field(min_length=1)] = key("who accepts it", "security@acme.example")
    expires: Annotated[str, AfterValidator(check_day)] = key(
        "last day on which it holds, in UTC; afterwards a preview refuses the stack", "2030-01-31"
    )


class PolicySection(Section):
    """Policies of docs/policies.md: what this stack approves, and exceptions to them."""

    registries: list[Registry] = key(
        "registries that images may come from, with their path if any; without any, that of `images.mirror`; without "
        "both, every registry",
        ["registry.acme.example/cloister"],
        default=[],
    )
    max_retention_days: Annotated[int, Field(ge=1, le=3650)] = key(
        "the longest `retention_days` that is agreed on", 90, default=365, unit="days"
    )
    secrets_encrypted_at_rest: bool = key(
        "confirm that the cluster's API server encrypts Secrets in etcd; no resource of the stack shows it",
        True,
        default=False,
    )
    exceptions: list[PolicyExceptionSection] = key("see below", [], default=[])
