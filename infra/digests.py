"""Digests of what a pod is configured with: in an annotation of the pod, they make a change roll the pod."""

import hashlib

import pulumi


def digest(*values: pulumi.Input[str]) -> pulumi.Output[str]:
    """Sixteen hexadecimal digits that differ when any of the values does; a secret when one of them is.

    Args:
        values: their order counts.
    """
    return pulumi.Output.all(*values).apply(lambda known: hashlib.sha256("\0".join(known).encode()).hexdigest()[:16])
