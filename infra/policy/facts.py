"""Facts of a stack file that no other resource shows: kept as the inputs of one component, so also in the state."""

from collections.abc import Iterable
from datetime import date
from typing import Final

import pulumi
from pydantic import BaseModel, ConfigDict

from infra.rendering.recording import RecordedResource

FACTS_TYPE: Final = "cloister:policy:StackFacts"


class PolicyException(BaseModel):
    """A decision to accept what breaks a policy.

    Attributes:
        policy: id of the policy.
        resource: title of the resource, or a pattern of titles with ``*`` and ``?``.
        reason: why it is accepted.
        owner: who accepts it.
        expires: last day on which it holds, in UTC; None for settings of the stack file that do not end.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: str
    resource: str
    reason: str
    owner: str
    expires: date | None = None


class StackFacts(BaseModel):
    """Facts of a stack file that policies use.

    Attributes:
        layer: layer of the stack; empty without a stack.
        customer: the customer; ``platform`` for a platform.
        environment: the environment.
        isolation: ``shared`` or ``nodes``.
        makes_the_cluster: the stack makes the cluster of bare hosts.
        registries: registries that images may come from; empty for all.
        max_retention_days: the longest retention that is allowed, in days.
        secrets_encrypted_at_rest: the operator confirms that the cluster encrypts Secrets.
        exceptions: accepted problems, also those that settings of the stack file allow.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    layer: str = ""
    customer: str = ""
    environment: str = ""
    isolation: str = "shared"
    makes_the_cluster: bool = False
    registries: tuple[str, ...] = ()
    max_retention_days: int = 365
    secrets_encrypted_at_rest: bool = False
    exceptions: tuple[PolicyException, ...] = ()


class StackFactsRecord(pulumi.ComponentResource):
    """The facts in Pulumi's state. It creates nothing in the cluster.

    Args:
        name: logical name of the component.
        facts: the facts.
    """

    def __init__(self, name: str, facts: StackFacts) -> None:
        super().__init__(FACTS_TYPE, name, facts.model_dump(mode="json"))
        self.register_outputs({})


def facts_of(resources: Iterable[RecordedResource]) -> StackFacts:
    """Return the facts that resources hold; the defaults if they hold none.

    Raises:
        pydantic.ValidationError: another version of the program wrote them.
    """
    for resource in resources:
        if resource.type == FACTS_TYPE:
            # Pulumi leaves out empty values.
            return StackFacts.model_validate({k: v for k, v in resource.inputs.items() if v is not None})
    return StackFacts()
