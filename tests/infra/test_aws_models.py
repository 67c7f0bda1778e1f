"""Inputs of resources of AWS against the service models of botocore: members, enums, patterns and lengths.

The provider turns inputs into requests. ``REQUESTS`` repeats that for resources whose mistakes AWS alone would find.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Final

import pytest
from botocore.loaders import Loader
from botocore.model import ListShape, MapShape, ServiceModel, Shape, StructureShape

from infra.rendering.recording import Recording
from tests.infra.aws_checks import of_kind
from tests.infra.previewed_stacks import AWS_STACK, preview

Inputs = Mapping[str, Any]


@cache
def shape_of(service: str, operation: str) -> StructureShape:
    model = ServiceModel(Loader().load_service_model(service, "service-2"), service)
    found = model.operation_model(operation).input_shape
    assert found is not None
    return found


def problems(value: Any, shape: Shape, path: str) -> Iterator[str]:
    """Yield what a value has that its shape does not allow. botocore itself checks neither enums nor patterns."""
    if isinstance(shape, StructureShape):
        for name in value.keys() - shape.members.keys():
            yield f"{path}.{name}: is not a member"
        for name in shape.required_members:
            if value.get(name) in (None, ""):
                yield f"{path}.{name}: is required"
        for name, inner in value.items():
            if name in shape.members and inner is not None:
                yield from problems(inner, shape.members[name], f"{path}.{name}")
    elif isinstance(shape, ListShape):
        for index, inner in enumerate(value):
            yield from problems(inner, shape.member, f"{path}[{index}]")
    elif isinstance(shape, MapShape):
        for name, inner in value.items():
            yield from problems(inner, shape.value, f"{path}.{name}")
    else:
        yield from _scalar_problems(value, shape, path)


def _scalar_problems(value: Any, shape: Shape, path: str) -> Iterator[str]:
    kinds = {"string": str, "boolean": bool, "integer": int, "long": int}
    if not isinstance(value, kinds.get(shape.type_name, object)):
        yield f"{path}: is no {shape.type_name}"
        return
    limits = shape.metadata
    size = len(value) if isinstance(value, str) else value
    if isinstance(value, str) and limits.get("enum") and value not in limits["enum"]:
        yield f"{path}: {value} is none of {limits['enum']}"
    # Patterns of Java that Python lacks, such as \\p{L}, are left out.
    pattern = limits.get("pattern", "")
    if isinstance(value, str) and pattern and "\\p{" not in pattern and not re.fullmatch(pattern, value, re.DOTALL):
        yield f"{path}: {value} does not match {pattern}"
    if not limits.get("min", size) <= size <= limits.get("max", size):
        yield f"{path}: {size} is not between {limits.get('min')} and {limits.get('max')}"


def capitalized(inputs: Inputs, *names: str, **renamed: str) -> dict[str, Any]:
    """Return inputs with the names of a request: capitalized, or renamed."""
    found = {name[0].upper() + name[1:]: inputs[name] for name in names if name in inputs}
    return found | {new: inputs[old] for old, new in renamed.items() if old in inputs}


def cluster_request(inputs: Inputs) -> dict[str, Any]:
    same = (
        "name",
        "version",
        "roleArn",
        "accessConfig",
        "bootstrapSelfManagedAddons",
        "computeConfig",
        "storageConfig",
    )
    config = {**inputs["encryptionConfig"]}
    network = {**inputs["kubernetesNetworkConfig"]}
    return {
        **{name: inputs[name] for name in (*same, "deletionProtection")},
        "resourcesVpcConfig": inputs["vpcConfig"],
        "kubernetesNetworkConfig": network,
        "encryptionConfig": [config],
        "logging": {"clusterLogging": [{"types": inputs["enabledClusterLogTypes"], "enabled": True}]},
    }


def database_request(inputs: Inputs) -> dict[str, Any]:
    same = ("allocatedStorage", "maxAllocatedStorage", "engine", "engineVersion", "storageType", "storageEncrypted")
    more = ("kmsKeyId", "manageMasterUserPassword", "masterUserSecretKmsKeyId", "port", "publiclyAccessible")
    last = ("vpcSecurityGroupIds", "backupRetentionPeriod", "copyTagsToSnapshot", "deletionProtection")
    return capitalized(
        inputs,
        *(*same, *more, *last, "autoMinorVersionUpgrade"),
        identifier="DBInstanceIdentifier",
        instanceClass="DBInstanceClass",
        dbName="DBName",
        username="MasterUsername",
        multiAz="MultiAZ",
        iamDatabaseAuthenticationEnabled="EnableIAMDatabaseAuthentication",
        dbSubnetGroupName="DBSubnetGroupName",
        parameterGroupName="DBParameterGroupName",
        caCertIdentifier="CACertificateIdentifier",
        enabledCloudwatchLogsExports="EnableCloudwatchLogsExports",
    )


def encryption_request(inputs: Inputs) -> dict[str, Any]:
    def rule(given: Inputs) -> dict[str, Any]:
        algorithm = given["applyServerSideEncryptionByDefault"]
        names = {"sseAlgorithm": "SSEAlgorithm", "kmsMasterKeyId": "KMSMasterKeyID"}
        return {
            "ApplyServerSideEncryptionByDefault": {names[name]: value for name, value in algorithm.items()},
            "BucketKeyEnabled": given["bucketKeyEnabled"],
        }

    rules = {"Rules": [rule(given) for given in inputs["rules"]]}
    return {"Bucket": inputs["bucket"], "ServerSideEncryptionConfiguration": rules}


REQUESTS: Final[Mapping[str, tuple[str, str, Callable[[Inputs], dict[str, Any]]]]] = {
    "eks/cluster:Cluster": ("eks", "CreateCluster", cluster_request),
    "eks/accessEntry:AccessEntry": ("eks", "CreateAccessEntry", dict),
    "eks/accessPolicyAssociation:AccessPolicyAssociation": ("eks", "AssociateAccessPolicy", dict),
    "eks/podIdentityAssociation:PodIdentityAssociation": ("eks", "CreatePodIdentityAssociation", dict),
    "rds/instance:Instance": ("rds", "CreateDBInstance", database_request),
    "kms/key:Key": ("kms", "CreateKey", lambda i: capitalized(i, "description", "policy")),
    "kms/alias:Alias": ("kms", "CreateAlias", lambda i: capitalized(i, "targetKeyId", name="AliasName")),
    "iam/role:Role": (
        "iam",
        "CreateRole",
        lambda i: capitalized(i, name="RoleName", assumeRolePolicy="AssumeRolePolicyDocument"),
    ),
    "iam/rolePolicy:RolePolicy": (
        "iam",
        "PutRolePolicy",
        lambda i: capitalized(i, role="RoleName", policy="PolicyDocument") | {"PolicyName": "inline"},
    ),
    "iam/rolePolicyAttachment:RolePolicyAttachment": (
        "iam",
        "AttachRolePolicy",
        lambda i: capitalized(i, "policyArn", role="RoleName"),
    ),
    "ecr/repository:Repository": (
        "ecr",
        "CreateRepository",
        lambda i: {
            "repositoryName": i["name"],
            "imageTagMutability": i["imageTagMutability"],
            "imageScanningConfiguration": i["imageScanningConfiguration"],
            "encryptionConfiguration": i["encryptionConfigurations"][0],
        },
    ),
    "ec2/vpcEndpoint:VpcEndpoint": (
        "ec2",
        "CreateVpcEndpoint",
        lambda i: capitalized(
            i,
            *("vpcId", "vpcEndpointType", "serviceName", "subnetIds", "securityGroupIds", "privateDnsEnabled"),
            policy="PolicyDocument",
            routeTableIds="RouteTableIds",
        ),
    ),
    "ec2/subnet:Subnet": ("ec2", "CreateSubnet", lambda i: capitalized(i, "vpcId", "availabilityZone", "cidrBlock")),
    "cloudwatch/logGroup:LogGroup": ("logs", "CreateLogGroup", lambda i: {"logGroupName": i["name"]}),
    "s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration": (
        "s3",
        "PutBucketEncryption",
        encryption_request,
    ),
}


@pytest.fixture(scope="module")
def stack() -> Recording:
    return preview(AWS_STACK)


@pytest.mark.parametrize("type_", REQUESTS)
def test_inputs_fit_the_models_of_aws(stack: Recording, type_: str) -> None:
    service, operation, request = REQUESTS[type_]
    resources = stack.of_type(f"aws:{type_}")
    assert resources
    shape = shape_of(service, operation)
    found = [problem for each in resources for problem in problems(request(each.inputs), shape, each.name)]
    assert found == []


def test_wrong_values_are_found(stack: Recording) -> None:
    shape = shape_of("eks", "CreateCluster")
    [cluster] = of_kind(stack, "Cluster")
    wrong = cluster_request(cluster.inputs) | {"name": "no such name", "versoin": "1.34"}
    wrong["logging"] = {"clusterLogging": [{"types": ["audits"], "enabled": "yes"}]}
    found = "\n".join(problems(wrong, shape, "cluster"))
    for expected in (
        "versoin: is not a member",
        "name: no such name does not match",
        "audits is none",
        "is no boolean",
    ):
        assert expected in found
