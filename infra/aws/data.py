"""Bucket and database of a stack on AWS, each with its own key.

The bucket has no versions, so that a deleted object is gone: with versions, S3 keeps the content of each deleted object
until a rule expires it (https://docs.aws.amazon.com/AmazonS3/latest/userguide/DeletingObjectVersions.html). The
database, which holds no content of requests, has backups.
"""

from dataclasses import dataclass
from typing import Final

import pulumi
from pulumi_aws import cloudwatch, rds, s3

from infra.aws.keys import create_key
from infra.aws.network import POSTGRES, AwsNetwork
from infra.aws.policies import Place, document, key_use_through, log_key_use
from infra.kubernetes.naming import StackNames
from infra.stack_file.sections import AwsDatabaseSection

_LOG_DAYS: Final = 90
_DATABASE_LOGS: Final = ("postgresql", "upgrade")
# https://docs.aws.amazon.com/AmazonRDS/latest/UserGuide/UsingWithRDS.SSL.html
_AUTHORITY: Final = "rds-ca-rsa2048-g1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The bucket of a stack.

    Attributes:
        name: its name.
        arn: its ARN.
        key_arn: ARN of the key that encrypts it.
        resources: what clients need.
    """

    name: str
    arn: str
    key_arn: pulumi.Output[str]
    resources: tuple[pulumi.Resource, ...]


def bucket_name(names: StackNames, place: Place) -> str:
    """Return the name of the bucket, with the account because names of buckets are global; at most 63 characters."""
    return f"{names.bucket}-{place.account_id}"


class AwsBucket(pulumi.ComponentResource):
    """The bucket, its log of accesses, and its key.

    Args:
        name: logical name of the component.
        names: names of the stack.
        place: account and region.
        keep_data: whether Pulumi refuses to delete bucket and key.
        opts: options of the component.
    """

    bucket: Bucket

    def __init__(
        self,
        name: str,
        names: StackNames,
        place: Place,
        *,
        keep_data: bool,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("cloister:aws:Bucket", name, None, opts)
        kept = pulumi.ResourceOptions(parent=self, protect=keep_data)
        own = bucket_name(names, place)
        arn = f"arn:{place.partition}:s3:::{own}"
        key = create_key(own, "files, plans and parts", place, (key_use_through(place, ["s3"]),), kept)
        log = self._secured("access-log", f"{own}-log", place, None, kept)
        bucket = self._secured("bucket", own, place, key.arn, kept)
        logging = s3.BucketLogging(
            "bucket", bucket=bucket[0].id, target_bucket=log[0].id, target_prefix="access/", opts=self._child(*log)
        )
        ends = {
            # Parts of an upload whose process died are content too.
            "bucket": (bucket[0], {"abort_incomplete_multipart_upload": {"days_after_initiation": 1}}),
            "access-log": (log[0], {"expiration": {"days": _LOG_DAYS}}),
        }
        for part, (resource, end) in ends.items():
            rule = {"id": part, "status": "Enabled", "filter": {}, **end}
            s3.BucketLifecycleConfiguration(part, bucket=resource.id, rules=[rule], opts=self._child())
        self.bucket = Bucket(name=own, arn=arn, key_arn=key.arn, resources=(*bucket, logging))
        self.register_outputs({})

    def _child(self, *after: pulumi.Resource) -> pulumi.ResourceOptions:
        return pulumi.ResourceOptions(parent=self, depends_on=list(after))

    def _secured(
        self, part: str, name: str, place: Place, key_arn: pulumi.Output[str] | None, kept: pulumi.ResourceOptions
    ) -> tuple[s3.Bucket, *tuple[pulumi.Resource, ...]]:
        """Create a bucket that is encrypted, never public, and reached by TLS only.

        S3 delivers access logs to buckets without a customer-managed key only:
        https://docs.aws.amazon.com/AmazonS3/latest/userguide/enable-server-access-logging.html.
        """
        bucket = s3.Bucket(part, bucket=name, force_destroy=False, opts=kept)
        algorithm = (
            {"sse_algorithm": "aws:kms", "kms_master_key_id": key_arn} if key_arn else {"sse_algorithm": "AES256"}
        )
        encryption = s3.BucketServerSideEncryptionConfiguration(
            part,
            bucket=bucket.id,
            rules=[{"apply_server_side_encryption_by_default": algorithm, "bucket_key_enabled": key_arn is not None}],
            opts=self._child(),
        )
        private = s3.BucketPublicAccessBlock(
            part,
            bucket=bucket.id,
            block_public_acls=True,
            block_public_policy=True,
            ignore_public_acls=True,
            restrict_public_buckets=True,
            opts=self._child(),
        )
        owner = s3.BucketOwnershipControls(
            part, bucket=bucket.id, rule={"object_ownership": "BucketOwnerEnforced"}, opts=self._child()
        )
        arn = f"arn:{place.partition}:s3:::{name}"
        statements = [
            {
                "Sid": "TlsOnly",
                "Effect": "Deny",
                "Principal": "*",
                "Action": "s3:*",
                "Resource": [arn, f"{arn}/*"],
                "Condition": {"Bool": {"aws:SecureTransport": "false"}},
            }
        ]
        if key_arn is None:
            statements.append(
                {
                    "Sid": "AccessLog",
                    "Effect": "Allow",
                    "Principal": {"Service": "logging.s3.amazonaws.com"},
                    "Action": "s3:PutObject",
                    "Resource": [f"{arn}/access/*"],
                    "Condition": {"StringEquals": {"aws:SourceAccount": place.account_id}},
                }
            )
        policy = s3.BucketPolicy(part, bucket=bucket.id, policy=document(*statements), opts=self._child(private))
        return bucket, encryption, private, owner, policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """The database of a stack.

    Attributes:
        host: host name of the primary.
        resource_id: id in ARNs of its roles.
        master_secret_arn: secret with the login of the owner, which RDS changes every week.
        key_arn: key of the database and of this secret.
        resources: what clients need.
    """

    host: pulumi.Output[str]
    resource_id: pulumi.Output[str]
    master_secret_arn: pulumi.Output[str]
    key_arn: pulumi.Output[str]
    resources: tuple[pulumi.Resource, ...]


class AwsDatabase(pulumi.ComponentResource):
    """Postgres by RDS, with a standby in another zone.

    RDS keeps the password of the owner in Secrets Manager and changes it every seven days
    (https://docs.aws.amazon.com/AmazonRDS/latest/UserGuide/rds-secrets-manager.html). The service logs in by its
    identity.

    Args:
        name: logical name of the component.
        names: names of the stack.
        place: account and region.
        network: the network.
        section: the section of the stack file.
        keep_data: whether AWS and Pulumi refuse to delete it.
        opts: options of the component.
    """

    database: Database

    def __init__(
        self,
        name: str,
        names: StackNames,
        place: Place,
        network: AwsNetwork,
        section: AwsDatabaseSection,
        *,
        keep_data: bool,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("cloister:aws:Database", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        kept = pulumi.ResourceOptions(parent=self, protect=keep_data)
        identifier = names.service_namespace
        through = key_use_through(place, ["rds", "secretsmanager"])
        key = create_key(f"{identifier}-database", "the database", place, (through, log_key_use(place)), kept)
        # RDS writes to the groups of these names; one that it creates itself is kept for ever, without the key:
        # https://docs.aws.amazon.com/AmazonRDS/latest/UserGuide/USER_LogAccess.Procedural.UploadtoCloudWatch.html
        logs = [
            cloudwatch.LogGroup(
                f"database-{log}",
                name=f"/aws/rds/instance/{identifier}/{log}",
                retention_in_days=_LOG_DAYS,
                kms_key_id=key.arn,
                opts=child,
            )
            for log in _DATABASE_LOGS
        ]
        subnets = rds.SubnetGroup("database", name=identifier, subnet_ids=network.subnet_ids["database"], opts=child)
        parameters = rds.ParameterGroup(
            "database",
            name=f"{identifier}-{section.postgres_version}",
            family=f"postgres{section.postgres_version}",
            parameters=[
                {"name": "rds.force_ssl", "value": "1"},
                {"name": "ssl_min_protocol_version", "value": "TLSv1.2"},
                # Queries can hold ids of files and batches; errors are logged without them.
                {"name": "log_statement", "value": "none"},
                {"name": "log_min_error_statement", "value": "panic"},
            ],
            opts=child,
        )
        instance = rds.Instance(
            "database",
            identifier=identifier,
            engine="postgres",
            engine_version=str(section.postgres_version),
            instance_class=section.instance_class,
            allocated_storage=section.storage_gib,
            max_allocated_storage=4 * section.storage_gib,
            storage_type="gp3",
            storage_encrypted=True,
            kms_key_id=key.arn,
            multi_az=True,
            db_name=names.database,
            username=names.database,
            manage_master_user_password=True,
            master_user_secret_kms_key_id=key.arn,
            iam_database_authentication_enabled=True,
            port=POSTGRES,
            publicly_accessible=False,
            db_subnet_group_name=subnets.name,
            vpc_security_group_ids=[network.groups.database],
            parameter_group_name=parameters.name,
            ca_cert_identifier=_AUTHORITY,
            # Backups of each day, and the write-ahead log between them: a recovery to any point in time.
            backup_retention_period=section.backup_days,
            copy_tags_to_snapshot=True,
            delete_automated_backups=not keep_data,
            deletion_protection=keep_data,
            skip_final_snapshot=not keep_data,
            final_snapshot_identifier=f"{identifier}-final",
            auto_minor_version_upgrade=True,
            enabled_cloudwatch_logs_exports=list(_DATABASE_LOGS),
            opts=pulumi.ResourceOptions(parent=self, protect=keep_data, depends_on=logs),
        )
        self.database = Database(
            host=instance.address,
            resource_id=instance.resource_id,
            master_secret_arn=instance.master_user_secrets.apply(lambda found: found[0]["secret_arn"]),
            key_arn=key.arn,
            resources=(instance,),
        )
        self.register_outputs({})
