"""The policies as a policy pack of Pulumi: ``pulumi preview --policy-pack infra/policy``.

It hands resources to the checks of this package and has no rule of its own. Pulumi shows a policy pack neither marks of
secrets nor ``retain_on_delete``: the program's own check judges those.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The CLI runs this file as a script in its own directory.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from infra.policy.assessment import judged
from infra.policy.catalogue import CATALOGUE, Policy
from infra.rendering.manifests import HELM_TYPES, is_made_by_chart
from infra.rendering.recording import RecordedResource, Recording


def recording_of(resources: Iterable[Any]) -> Recording:
    """Return resources of a policy pack as a recording, without those that charts create.

    Args:
        resources: objects with the fields of ``pulumi_policy.PolicyResource``.
    """
    return Recording(
        resources=tuple(
            RecordedResource(
                type=each.resource_type,
                name=each.name,
                inputs=_plain(each.props),
                secrets=frozenset({("stringData",), ("data",)} if each.resource_type.endswith(":Secret") else ()),
                custom=not each.resource_type.startswith("cloister:") or each.resource_type in HELM_TYPES,
                urn=each.urn,
                parent="",
                provider="",
                protect=bool(each.opts.protect),
                retain_on_delete=bool(each.opts.protect),
                delete_before_replace=None,
                dependencies=(),
                ignore_changes=(),
            )
            for each in resources
            if not is_made_by_chart(each.urn)
        ),
        outputs={},
        secret_outputs=frozenset(),
        messages=(),
    )


def _plain(value: Any) -> Any:
    """Return a value without Pulumi's proxies, and without what a preview does not know yet."""
    if isinstance(value, Mapping):
        return {key: _plain_item(value, key) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain_item(value, index) for index in range(len(value))]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain_item(container: Any, key: Any) -> Any:
    try:
        return _plain(container[key])
    except Exception as error:
        if type(error).__name__ != "UnknownValueError":
            raise
        return None


def main() -> None:
    """Serve the policy pack to the CLI."""
    import pulumi_policy

    levels = {
        "mandatory": pulumi_policy.EnforcementLevel.MANDATORY,
        "advisory": pulumi_policy.EnforcementLevel.ADVISORY,
    }

    def validation(policy: Policy) -> Any:
        def validate(args: Any, report: Any) -> None:
            for violation, exception in judged(recording_of(args.resources), today=datetime.now(UTC).date()):
                if violation.policy is policy and exception is None:
                    report(str(violation), None)

        return validate

    pulumi_policy.PolicyPack(
        name="cloister",
        policies=[
            pulumi_policy.StackValidationPolicy(
                name=policy.id,
                description=policy.title,
                enforcement_level=levels[policy.severity],
                validate=validation(policy),
            )
            for policy in CATALOGUE
        ],
    )


if __name__ == "__main__":
    main()
