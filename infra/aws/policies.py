"""IAM policy documents of the stack, as plain data.

A policy of a role names its actions and resources. Key policies and endpoint policies have ``*`` as resource where AWS
has no other way: a key policy applies to its key only, and an endpoint policy to the endpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pulumi

Statement = Mapping[str, Any]

# Administration without use: whoever administers a key cannot decrypt with it.
_KEY_ADMINISTRATION: Final = (
    "kms:CancelKeyDeletion",
    "kms:DescribeKey",
    "kms:DisableKey",
    "kms:EnableKey",
    "kms:EnableKeyRotation",
    "kms:GetKeyPolicy",
    "kms:GetKeyRotationStatus",
    "kms:ListGrants",
    "kms:ListKeyPolicies",
    "kms:ListResourceTags",
    "kms:PutKeyPolicy",
    "kms:RevokeGrant",
    "kms:ScheduleKeyDeletion",
    "kms:TagResource",
    "kms:UntagResource",
    "kms:UpdateKeyDescription",
)
KEY_USE: Final = (
    "kms:Decrypt",
    "kms:DescribeKey",
    "kms:Encrypt",
    "kms:GenerateDataKey",
    "kms:GenerateDataKeyWithoutPlaintext",
    "kms:ReEncryptFrom",
    "kms:ReEncryptTo",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An account in a region, and the cluster in it.

    Attributes:
        account_id: the account.
        region: the region.
        cluster: name of the cluster.
    """

    account_id: str
    region: str
    cluster: str

    @property
    def partition(self) -> str:
        """The partition in ARNs: https://docs.aws.amazon.com/IAM/latest/UserGuide/reference-arns.html."""
        prefixes = {"cn-": "aws-cn", "us-gov-": "aws-us-gov"}
        return next((name for prefix, name in prefixes.items() if self.region.startswith(prefix)), "aws")

    @property
    def root(self) -> str:
        """The account as a principal."""
        return f"arn:{self.partition}:iam::{self.account_id}:root"

    @property
    def cluster_arn(self) -> str:
        """ARN of the cluster."""
        return self.arn("eks", f"cluster/{self.cluster}")

    def arn(self, service: str, resource: str) -> str:
        """Return the ARN of a resource of the account in the region."""
        return f"arn:{self.partition}:{service}:{self.region}:{self.account_id}:{resource}"

    def managed_policy(self, name: str) -> str:
        """Return the ARN of a policy that AWS manages."""
        return f"arn:{self.partition}:iam::aws:policy/{name}"


def document(*statements: Statement) -> pulumi.Output[str]:
    """Return a policy document as JSON; values may be outputs."""
    return pulumi.Output.json_dumps({"Version": "2012-10-17", "Statement": list(statements)}, sort_keys=True)


def trust(service: str, *, tags_session: bool = False, condition: Mapping[str, Any] | None = None) -> Statement:
    """Return the statement by which a service of AWS assumes a role."""
    return {
        "Effect": "Allow",
        "Principal": {"Service": service},
        "Action": ["sts:AssumeRole", *(["sts:TagSession"] if tags_session else [])],
        **({"Condition": condition} if condition else {}),
    }


def key_policy(place: Place, *users: Statement) -> pulumi.Output[str]:
    """Return the policy of a key: the account administers it, and ``users`` use it.

    Without the first statement nobody could change the key any more:
    https://docs.aws.amazon.com/kms/latest/developerguide/key-policy-default.html.
    """
    administration = {
        "Sid": "Administration",
        "Effect": "Allow",
        "Principal": {"AWS": place.root},
        "Action": list(_KEY_ADMINISTRATION),
        "Resource": "*",
    }
    return document(administration, *users)


def key_use_through(place: Place, services: Sequence[str]) -> Statement:
    """Return the statement by which roles of the account use a key through services, if a policy of theirs allows it.

    Source: https://docs.aws.amazon.com/kms/latest/developerguide/conditions-kms.html#conditions-kms-via-service.
    """
    return {
        "Sid": "UseThroughServices",
        "Effect": "Allow",
        "Principal": {"AWS": place.root},
        "Action": [*KEY_USE, "kms:CreateGrant"],
        "Resource": "*",
        "Condition": {
            "StringEquals": {
                "kms:CallerAccount": place.account_id,
                "kms:ViaService": [f"{service}.{place.region}.amazonaws.com" for service in services],
            }
        },
    }


def log_key_use(place: Place) -> Statement:
    """Return the statement by which CloudWatch Logs encrypts log groups of the account.

    Source: https://docs.aws.amazon.com/AmazonCloudWatch/latest/logs/encrypt-log-data-kms.html.
    """
    return {
        "Sid": "Logs",
        "Effect": "Allow",
        "Principal": {"Service": f"logs.{place.region}.amazonaws.com"},
        "Action": list(KEY_USE),
        "Resource": "*",
        "Condition": {"ArnLike": {"kms:EncryptionContext:aws:logs:arn": place.arn("logs", "log-group:*")}},
    }


def endpoint_policy(place: Place, *exceptions: Statement) -> pulumi.Output[str]:
    """Return the policy of an endpoint: principals of the account reach resources of the account.

    Some requests have no resource, so that the second condition applies if there is one. Sources:
    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_condition-keys.html#condition-keys-resourceaccount
    and https://docs.aws.amazon.com/vpc/latest/privatelink/vpc-endpoints-access.html.
    """
    own = {
        "Sid": "OwnAccount",
        "Effect": "Allow",
        "Principal": "*",
        "Action": "*",
        "Resource": "*",
        "Condition": {
            "StringEquals": {"aws:PrincipalAccount": place.account_id},
            "StringEqualsIfExists": {"aws:ResourceAccount": place.account_id},
        },
    }
    return document(own, *exceptions)
