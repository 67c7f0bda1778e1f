"""Checks of the AWS half of a recorded stack. Each yields what is wrong, as ``resource: problem``."""

import json
from collections.abc import Iterator
from typing import Any, Final

from infra.aws.network import INTERFACE_SERVICES
from infra.rendering.recording import RecordedResource, Recording

Problems = Iterator[str]
_WAYS_OUT: Final = ("InternetGateway", "EgressOnlyInternetGateway", "NatGateway", "Eip", "EipAssociation")
_EVERYWHERE: Final = ("0.0.0.0/0", "::/0")
_EXCEPTIONS: Final = ("LayersOfImages", "ImagesOfEks")
"""Statements of endpoint policies about resources of AWS: downloads of images."""
_AWS_POLICIES: Final = {
    "AmazonEKSBlockStoragePolicy",
    "AmazonEKSClusterPolicy",
    "AmazonEKSComputePolicy",
    "AmazonEKSLoadBalancingPolicy",
    "AmazonEKSNetworkingPolicy",
    "AmazonEC2ContainerRegistryPullOnly",
    "AmazonEKSWorkerNodeMinimalPolicy",
}
"""Policies of AWS that Auto Mode needs; they have wildcards, which tags of the cluster limit."""


def of_kind(recording: Recording, kind: str) -> list[RecordedResource]:
    """Return the resources of AWS of one kind, e.g. ``VpcEndpoint``."""
    return [each for each in recording.of_type(kind) if each.type.startswith("aws:")]


def statements(resource: RecordedResource, field: str = "policy") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(resource.inputs.get(field) or '{"Statement": []}')["Statement"]
    return found


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def internet_problems(recording: Recording) -> Problems:
    """Find ways between the VPC and the internet."""
    for kind in _WAYS_OUT:
        for each in of_kind(recording, kind):
            yield f"{each.name}: is a way to the internet"
    for each in of_kind(recording, "Subnet"):
        if each.inputs.get("mapPublicIpOnLaunch") is not False:
            yield f"{each.name}: may give public addresses"
    for each in of_kind(recording, "Route"):
        if each.inputs.get("destinationCidrBlock") in _EVERYWHERE:
            yield f"{each.name}: leads everywhere"
    for each in of_kind(recording, "Cluster"):
        vpc = each.inputs["vpcConfig"]
        if vpc.get("endpointPublicAccess") is not False or vpc.get("endpointPrivateAccess") is not True:
            yield f"{each.name}: the API has a public address"
    for each in of_kind(recording, "Instance"):
        if each.inputs.get("publiclyAccessible") is not False:
            yield f"{each.name}: has a public address"


def endpoint_problems(recording: Recording) -> Problems:
    """Check that every service has an endpoint, for principals of the account only."""
    found = of_kind(recording, "VpcEndpoint")
    services = {each.inputs["serviceName"].split(".", 3)[3] for each in found}
    yield from (f"{service}: has no endpoint" for service in sorted({*INTERFACE_SERVICES} - services))
    for each in found:
        if not statements(each):
            yield f"{each.name}: has no policy"
        for statement in statements(each):
            condition = statement.get("Condition", {}).get("StringEquals", {})
            if "aws:PrincipalAccount" not in condition and statement.get("Sid") != "LayersOfImages":
                yield f"{each.name}: is open to principals of other accounts"
            own = statement.get("Condition", {}).get("StringEqualsIfExists", {})
            if "aws:ResourceAccount" not in own and statement.get("Sid") not in _EXCEPTIONS:
                yield f"{each.name}: leads to resources of other accounts"
        if each.inputs["vpcEndpointType"] == "Interface" and each.inputs.get("privateDnsEnabled") is not True:
            yield f"{each.name}: has no private name"


def group_problems(recording: Recording) -> Problems:
    """Check that security groups name each other, and no open network."""
    for kind in ("SecurityGroupIngressRule", "SecurityGroupEgressRule"):
        for each in of_kind(recording, kind):
            cidr = each.inputs.get("cidrIpv4") or each.inputs.get("cidrIpv6")
            if cidr in _EVERYWHERE or not (cidr or each.inputs.get("referencedSecurityGroupId")):
                yield f"{each.name}: is open to everyone"
    for each in (*of_kind(recording, "SecurityGroup"), *of_kind(recording, "DefaultSecurityGroup")):
        if each.inputs.get("ingress") or each.inputs.get("egress"):
            yield f"{each.name}: has rules of its own"


def right_problems(recording: Recording) -> Problems:
    """Check that roles have named actions and resources, and that pods take none but theirs."""
    for each in of_kind(recording, "RolePolicy"):
        for statement in statements(each):
            if any("*" in action for action in _listed(statement["Action"])):
                yield f"{each.name}: has * among its actions"
            # The resource is the sixth part of an ARN.
            if any(resource.split(":", 5)[-1].startswith("*") for resource in _listed(statement["Resource"])):
                yield f"{each.name}: has * as a resource"
    for each in of_kind(recording, "RolePolicyAttachment"):
        if each.inputs["policyArn"].rpartition("/")[2] not in _AWS_POLICIES:
            yield f"{each.name}: is not a policy that Auto Mode needs"
    for each in of_kind(recording, "Role"):
        for statement in statements(each, "assumeRolePolicy"):
            condition = statement.get("Condition", {}).get("StringEquals", {})
            if (
                "pods.eks.amazonaws.com" in _listed(statement["Principal"].get("Service", []))
                and not {
                    "aws:SourceAccount",
                    "aws:RequestTag/eks-cluster-arn",
                    "aws:RequestTag/kubernetes-namespace",
                    "aws:RequestTag/kubernetes-service-account",
                }
                <= condition.keys()
            ):
                yield f"{each.name}: pods of other accounts can take the role"


def key_problems(recording: Recording) -> Problems:
    """Check that keys rotate, and that the account uses them through services only."""
    for each in of_kind(recording, "Key"):
        if each.inputs.get("enableKeyRotation") is not True:
            yield f"{each.name}: does not rotate"
        for statement in statements(each):
            uses = {"kms:Decrypt", "kms:*", "*"} & set(_listed(statement["Action"]))
            if uses and "root" in str(statement["Principal"]) and not statement.get("Condition"):
                yield f"{each.name}: the whole account decrypts with it"


def bucket_problems(recording: Recording) -> Problems:
    """Check encryption, TLS and privacy of the buckets."""
    buckets = {each.name for each in of_kind(recording, "Bucket")}
    for kind in ("BucketPublicAccessBlock", "BucketServerSideEncryptionConfiguration", "BucketPolicy"):
        yield from (
            f"{name}: has no {kind}" for name in sorted(buckets - {each.name for each in of_kind(recording, kind)})
        )
    for each in of_kind(recording, "BucketPublicAccessBlock"):
        if not all(value is True for name, value in each.inputs.items() if name != "bucket"):
            yield f"{each.name}: may be public"
    for each in of_kind(recording, "BucketPolicy"):
        if not any(
            (s["Effect"], s.get("Condition")) == ("Deny", {"Bool": {"aws:SecureTransport": "false"}})
            for s in statements(each)
        ):
            yield f"{each.name}: accepts requests without TLS"
    for each in of_kind(recording, "BucketVersioning"):
        yield f"{each.name}: keeps versions of deleted objects"


def database_problems(recording: Recording) -> Problems:
    """Check encryption, TLS, copies and protection of the database."""
    for each in of_kind(recording, "Instance"):
        wanted = {
            "storageEncrypted": True,
            "multiAz": True,
            "deletionProtection": True,
            "manageMasterUserPassword": True,
            "iamDatabaseAuthenticationEnabled": True,
        }
        yield from (f"{each.name}: {name} is off" for name, on in wanted.items() if each.inputs.get(name) is not on)
        if not each.inputs.get("kmsKeyId"):
            yield f"{each.name}: has no key of the customer"
        if each.inputs.get("backupRetentionPeriod", 0) < 7:
            yield f"{each.name}: backups reach back less than a week"
        if each.inputs.get("password"):
            yield f"{each.name}: has a password in the state"
    for each in of_kind(recording, "ParameterGroup"):
        if {"name": "rds.force_ssl", "value": "1"} not in each.inputs["parameters"]:
            yield f"{each.name}: accepts connections without TLS"


def cluster_problems(recording: Recording) -> Problems:
    """Check the cluster, its registry and the logs."""
    for each in of_kind(recording, "Cluster"):
        if (each.inputs.get("encryptionConfig") or {}).get("resources") != ["secrets"]:
            yield f"{each.name}: Secrets are not encrypted"
        if len(each.inputs.get("enabledClusterLogTypes") or ()) != 5:
            yield f"{each.name}: lacks logs of the control plane"
        if each.inputs["accessConfig"] != {
            "authenticationMode": "API",
            "bootstrapClusterCreatorAdminPermissions": False,
        }:
            yield f"{each.name}: access is not by access entries only"
    for each in of_kind(recording, "Repository"):
        if each.inputs.get("imageTagMutability") != "IMMUTABLE":
            yield f"{each.name}: tags can move"
        if each.inputs["encryptionConfigurations"][0].get("encryptionType") != "KMS":
            yield f"{each.name}: has no key of the customer"
    for each in of_kind(recording, "LogGroup"):
        if not each.inputs.get("kmsKeyId") or not each.inputs.get("retentionInDays"):
            yield f"{each.name}: is not encrypted, or kept for ever"


CHECKS: Final = (
    internet_problems,
    endpoint_problems,
    group_problems,
    right_problems,
    key_problems,
    bucket_problems,
    database_problems,
    cluster_problems,
)


def all_problems(recording: Recording) -> list[str]:
    """Return what any check finds."""
    return [problem for check in CHECKS for problem in check(recording)]
