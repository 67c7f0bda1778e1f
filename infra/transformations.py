"""What holds for every resource below a component, whoever wrote it."""

from collections.abc import Callable, Sequence

import pulumi

Transformation = Callable[[pulumi.ResourceTransformationArgs], pulumi.ResourceTransformationResult | None]


def after(resources: Sequence[pulumi.Resource]) -> Transformation:
    """Everything waits for these resources: a component's ``depends_on`` does not reach its children."""

    def wait(args: pulumi.ResourceTransformationArgs) -> pulumi.ResourceTransformationResult | None:
        opts = pulumi.ResourceOptions.merge(args.opts, pulumi.ResourceOptions(depends_on=list(resources)))
        return pulumi.ResourceTransformationResult(props=args.props, opts=opts)

    return wait
