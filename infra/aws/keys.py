"""Customer-managed keys of KMS, one for each purpose, with yearly rotation."""

import pulumi
from pulumi_aws import kms

from infra.aws.policies import Place, Statement, key_policy


def create_key(
    name: str, description: str, place: Place, users: tuple[Statement, ...], opts: pulumi.ResourceOptions
) -> kms.Key:
    """Create a key with an alias.

    Args:
        name: logical name, and the alias below ``alias/``.
        description: what it encrypts.
        place: account and region.
        users: statements that allow its use.
        opts: options of both resources.
    """
    key = kms.Key(
        name,
        description=description,
        enable_key_rotation=True,
        # The longest time in which the deletion, which loses all data that it encrypts, can be cancelled.
        deletion_window_in_days=30,
        policy=key_policy(place, *users),
        opts=opts,
    )
    kms.Alias(name, name=f"alias/{name}", target_key_id=key.key_id, opts=opts)
    return key
