"""Identities of pods: one role for each service account, by EKS Pod Identity.

Jobs have no role: they reach objects by URLs that the coordinator signs, and end in pods that parse untrusted input.
KubeRay creates an account for each Ray cluster, which no association names. Source:
https://docs.aws.amazon.com/eks/latest/userguide/pod-id-role.html.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pulumi
from pulumi_aws import eks, iam

from infra.aws.data import Bucket, Database
from infra.aws.policies import Place, Statement, document, trust
from infra.kubernetes.naming import StackNames
from infra.tenancy.rbac import AUDIT_EXPORT, MIGRATIONS
from ray_job.contract.cluster import API, COORDINATOR, RECONCILER

_READ: Final = ("s3:GetObject",)
_READ_AND_WRITE: Final = (*_READ, "s3:AbortMultipartUpload", "s3:PutObject")
_ALL: Final = (*_READ_AND_WRITE, "s3:DeleteObject", "s3:DeleteObjectVersion", "s3:ListMultipartUploadParts")


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityArgs:
    """Targets of the roles of a stack.

    Attributes:
        names: names of the stack.
        place: account, region and name of the cluster.
        cluster_name: the same name, when the cluster exists.
        bucket: the bucket; None for another object store.
        prefix: prefix of the stack's objects.
        database: the database; None for another one.
        service_role: the service's role in the database.
    """

    names: StackNames
    place: Place
    cluster_name: pulumi.Input[str]
    bucket: Bucket | None
    prefix: str
    database: Database | None
    service_role: str


class AwsIdentities(pulumi.ComponentResource):
    """Roles of the service's accounts, and the associations that give them to pods.

    Attributes:
        resources: what pods need before they start.
    """

    resources: tuple[pulumi.Resource, ...]

    def __init__(self, name: str, args: IdentityArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:aws:Identities", name, None, opts)
        self.resources = tuple(
            resource
            for account, statements in rights(args).items()
            for resource in self._identity(args, account, statements)
        )
        self.register_outputs({})

    def _identity(
        self, args: IdentityArgs, account: str, statements: Sequence[Statement]
    ) -> tuple[pulumi.Resource, ...]:
        names, place = args.names, args.place
        child = pulumi.ResourceOptions(parent=self)
        # EKS states these tags in each request, so no other account, namespace or cluster can take the role.
        condition = {
            "StringEquals": {
                "aws:SourceAccount": place.account_id,
                "aws:RequestTag/eks-cluster-arn": place.cluster_arn,
                "aws:RequestTag/kubernetes-namespace": names.service_namespace,
                "aws:RequestTag/kubernetes-service-account": account,
            }
        }
        role = iam.Role(
            f"identity-{account}",
            name=f"{names.service_namespace}-{account}",
            assume_role_policy=document(trust("pods.eks.amazonaws.com", tags_session=True, condition=condition)),
            opts=child,
        )
        policy = iam.RolePolicy(f"identity-{account}", role=role.name, policy=document(*statements), opts=child)
        association = eks.PodIdentityAssociation(
            f"identity-{account}",
            cluster_name=args.cluster_name,
            namespace=names.service_namespace,
            service_account=account,
            role_arn=role.arn,
            opts=pulumi.ResourceOptions(parent=self, depends_on=[policy]),
        )
        return policy, association


def rights(args: IdentityArgs) -> dict[str, list[Statement]]:
    """Return the statements of each account that has a right."""
    found: dict[str, list[Statement]] = {
        account: [] for account in (API, RECONCILER, COORDINATOR, MIGRATIONS, AUDIT_EXPORT)
    }
    if args.bucket is not None:
        for account, actions in ((API, _ALL), (RECONCILER, _ALL), (COORDINATOR, _READ_AND_WRITE)):
            found[account] += _bucket_rights(args, args.bucket, actions)
    if args.database is not None:
        for account in (API, RECONCILER, COORDINATOR, AUDIT_EXPORT):
            found[account].append(_login(args, args.database))
        secret = {
            "Sid": "OwnersPassword",
            "Effect": "Allow",
            "Action": ["secretsmanager:GetSecretValue"],
            "Resource": [args.database.master_secret_arn],
        }
        decrypt = _key_use(args.place, args.database.key_arn, "secretsmanager", ("kms:Decrypt",))
        found[MIGRATIONS] += [secret, decrypt]
    return {account: statements for account, statements in found.items() if statements}


def _bucket_rights(args: IdentityArgs, bucket: Bucket, actions: Sequence[str]) -> list[Statement]:
    """Return the statements for objects below the stack's prefix."""
    objects = {
        "Sid": "Objects",
        "Effect": "Allow",
        "Action": sorted(actions),
        "Resource": [f"{bucket.arn}/{args.prefix}/*"],
    }
    below: Mapping[str, Any] = {"StringLike": {"s3:prefix": [f"{args.prefix}/*"]}}
    lists = {
        "Sid": "List",
        "Effect": "Allow",
        "Action": ["s3:ListBucket", "s3:ListBucketMultipartUploads", "s3:ListBucketVersions"],
        "Resource": [bucket.arn],
        "Condition": below,
    }
    # A request for the head of the bucket is ListBucket without a prefix.
    checks = {
        "Sid": "Checks",
        "Effect": "Allow",
        "Action": ["s3:GetBucketObjectLockConfiguration", "s3:GetBucketVersioning"],
        "Resource": [bucket.arn],
    }
    head = {
        "Sid": "Head",
        "Effect": "Allow",
        "Action": ["s3:ListBucket"],
        "Resource": [bucket.arn],
        "Condition": {"Null": {"s3:prefix": "true"}},
    }
    key = _key_use(args.place, bucket.key_arn, "s3", ("kms:Decrypt", "kms:GenerateDataKey"))
    return [objects, lists, checks, head, key]


def _login(args: IdentityArgs, database: Database) -> Statement:
    """Return the right to log in as the service's role.

    Source: https://docs.aws.amazon.com/AmazonRDS/latest/UserGuide/UsingWithRDS.IAMDBAuth.IAMPolicy.html.
    """
    user = database.resource_id.apply(
        lambda resource_id: args.place.arn("rds-db", f"dbuser:{resource_id}/{args.service_role}")
    )
    return {"Sid": "Login", "Effect": "Allow", "Action": ["rds-db:connect"], "Resource": [user]}


def _key_use(place: Place, key_arn: pulumi.Output[str], service: str, actions: Sequence[str]) -> Statement:
    return {
        "Sid": "Key",
        "Effect": "Allow",
        "Action": list(actions),
        "Resource": [key_arn],
        "Condition": {"StringEquals": {"kms:ViaService": f"{service}.{place.region}.amazonaws.com"}},
    }
