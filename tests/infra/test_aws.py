"""A private stack on AWS: its resources, and the mistakes that the checks find."""

import copy
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from infra.capacity.instance_types import INSTANCE_TYPES
from infra.rendering.manifests import manifests
from infra.rendering.recording import Recording
from ray_job.contract.accelerators import ACCELERATORS
from tests.infra.aws_checks import all_problems, of_kind, statements
from tests.infra.previewed_stacks import AWS_STACK as NAME
from tests.infra.previewed_stacks import changed, preview, preview_values, stack_text

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def stack() -> Recording:
    return preview(NAME)


def with_change(recording: Recording, name: str, type_: str, change: Change | None) -> Recording:
    """Return a recording in which the inputs of a resource are changed, or the resource is missing."""
    resources = []
    found = 0
    for each in recording.resources:
        if (each.name, each.type.rpartition(":")[2]) == (name, type_):
            found += 1
            if change is None:
                continue
            inputs = copy.deepcopy(each.inputs)
            change(inputs)
            each = dataclasses.replace(each, inputs=inputs)  # noqa: PLW2901
        resources.append(each)
    assert found == 1, f"{found} resources are {name}"
    return dataclasses.replace(recording, resources=tuple(resources))


def policy(change: Change, field: str = "policy") -> Change:
    """Return a change of the first statement of a policy."""

    def applied(inputs: dict[str, Any]) -> None:
        document = json.loads(inputs[field])
        change(document["Statement"][0])
        inputs[field] = json.dumps(document)

    return applied


def setting(**values: Any) -> Change:
    return lambda inputs: inputs.update(values)


def test_example_meets_all_checks(stack: Recording) -> None:
    assert all_problems(stack) == []


@pytest.mark.parametrize(
    ("name", "type_", "change", "problem"),
    [
        ("kms", "VpcEndpoint", None, "kms: has no endpoint"),
        ("sts", "VpcEndpoint", setting(policy=None), "sts: has no policy"),
        ("ec2", "VpcEndpoint", policy(lambda s: s.pop("Condition")), "ec2: is open to principals of other accounts"),
        ("s3", "VpcEndpoint", policy(lambda s: s["Condition"].pop("StringEqualsIfExists")), "s3: leads to resources"),
        ("s3", "VpcEndpoint", setting(privateDnsEnabled=False), "s3: has no private name"),
        (
            "database-from-nodes",
            "SecurityGroupIngressRule",
            lambda i: i.update(cidrIpv4="0.0.0.0/0", referencedSecurityGroupId=None),
            "database-from-nodes: is open to everyone",
        ),
        ("identity-api", "RolePolicy", policy(lambda s: s.update(Action=["s3:*"])), "identity-api: has * among"),
        ("identity-api", "RolePolicy", policy(lambda s: s.update(Resource=["*"])), "identity-api: has * as a resource"),
        ("identity-api", "RolePolicy", policy(lambda s: s.update(Resource=["arn:aws:s3:::*"])), "identity-api: has *"),
        (
            "identity-api",
            "Role",
            policy(lambda s: s.pop("Condition"), "assumeRolePolicy"),
            "identity-api: pods of other accounts",
        ),
        ("nodes-eu-central-1a", "Subnet", setting(mapPublicIpOnLaunch=True), "nodes-eu-central-1a: may give"),
        ("cluster", "Cluster", lambda i: i["vpcConfig"].update(endpointPublicAccess=True), "cluster: the API has"),
        ("cluster", "Cluster", setting(encryptionConfig=None), "cluster: Secrets are not encrypted"),
        ("cluster", "Cluster", setting(enabledClusterLogTypes=["api"]), "cluster: lacks logs"),
        ("database", "Instance", setting(storageEncrypted=False), "database: storageEncrypted is off"),
        ("database", "Instance", setting(publiclyAccessible=True), "database: has a public address"),
        ("database", "Instance", setting(backupRetentionPeriod=1), "database: backups reach back"),
        ("database", "ParameterGroup", setting(parameters=[]), "database: accepts connections without TLS"),
        ("bucket", "BucketPolicy", None, "bucket: has no BucketPolicy"),
        ("bucket", "BucketPublicAccessBlock", setting(blockPublicPolicy=False), "bucket: may be public"),
        ("service", "Repository", setting(imageTagMutability="MUTABLE"), "service: tags can move"),
        ("vela-prod-images", "Key", setting(enableKeyRotation=False), "vela-prod-images: does not rotate"),
        ("flow-logs", "LogGroup", setting(kmsKeyId=None), "flow-logs: is not encrypted"),
    ],
)
def test_mistake_turns_a_check_red(
    stack: Recording, name: str, type_: str, change: Change | None, problem: str
) -> None:
    found = all_problems(with_change(stack, name, type_, change))
    assert [each for each in found if each.startswith(problem)]


def test_internet_gateway_turns_a_check_red(stack: Recording) -> None:
    vpc = of_kind(stack, "Vpc")[0]
    gateway = dataclasses.replace(vpc, type="aws:ec2/internetGateway:InternetGateway", name="way-out")
    changed = dataclasses.replace(stack, resources=(*stack.resources, gateway))
    assert "way-out: is a way to the internet" in all_problems(changed)


def test_every_subnet_is_private_and_has_its_own_route_table(stack: Recording) -> None:
    subnets, tables = of_kind(stack, "Subnet"), of_kind(stack, "RouteTableAssociation")
    assert len(subnets) == 12
    assert {each.inputs["availabilityZone"] for each in subnets} == {f"eu-central-1{zone}" for zone in "abc"}
    assert len({each.inputs["routeTableId"] for each in tables}) == len(subnets)
    assert len({each.inputs["cidrBlock"] for each in subnets}) == len(subnets)


def test_every_subnet_has_a_route_to_the_networks_behind_an_attachment(stack: Recording) -> None:
    routes = of_kind(stack, "Route")
    assert {(each.inputs["destinationCidrBlock"], each.inputs["transitGatewayId"]) for each in routes} == {
        ("10.8.0.0/16", "tgw-0123456789abcdef0")
    }
    assert len({each.inputs["routeTableId"] for each in routes}) == len(of_kind(stack, "Subnet"))
    assert stack.named("control-plane-from-10.8.0.0/16").inputs["toPort"] == 443


def test_platform_on_aws_has_no_data() -> None:
    of_customers = ("customer", "environment", "database", "object_store", "models", "retention_days")
    customers = [{"customer": "vela", "environment": "prod"}]
    without = dict.fromkeys((*of_customers, "encryption_keys", "receipt_key"))
    platform = preview_values(changed(NAME, layer="platform", customers=customers, **without), frozenset())
    assert all_problems(platform) == []
    assert (of_kind(platform, "Instance"), of_kind(platform, "Bucket")) == ([], [])
    assert len([each for each in manifests(platform) if each.kind == "NodePool"]) == 3
    assert platform.outputs["repositories"]


def test_target_of_the_first_phase_has_no_object_of_the_cluster(stack: Recording) -> None:
    first = [each for each in stack.resources if "cloister:aws:" in each.urn and each.custom]
    assert {each.type.partition(":")[0] for each in first} == {"aws"}
    assert {each.urn for each in stack.resources if each.type.startswith("aws:")} == {each.urn for each in first}


def test_jobs_have_no_identity(stack: Recording) -> None:
    associations = of_kind(stack, "PodIdentityAssociation")
    assert {each.inputs["namespace"] for each in associations} == {"cloister-vela-prod"}
    accounts = {each.inputs["serviceAccount"] for each in associations}
    assert accounts == {"api", "reconciler", "coordinator", "migrations", "audit-export"}


def test_rights_are_those_of_the_stack(stack: Recording) -> None:
    policies = {each.name.removeprefix("identity-"): each for each in of_kind(stack, "RolePolicy")}

    def actions(account: str) -> set[str]:
        return {action for statement in statements(policies[account]) for action in statement["Action"]}

    assert "secretsmanager:GetSecretValue" in actions("migrations")
    assert "s3:DeleteObject" not in actions("coordinator")
    assert actions("audit-export") == {"rds-db:connect"}


def test_no_pod_has_a_static_login(stack: Recording) -> None:
    secrets = {each.name for each in manifests(stack) if each.kind == "Secret"}
    assert secrets == {"encryption-keys", "receipt-key"}
    [api] = [each for each in manifests(stack) if (each.kind, each.name) == ("Deployment", "api")]
    environment = {each["name"]: each["value"] for each in api.body["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert environment["CLOISTER_OBJECT_STORE"] == "s3://cloister-vela-prod-123456789012/vela/prod?region=eu-central-1"
    assert "aws_iam_region=eu-central-1" in environment["CLOISTER_DATABASE_URL"]
    assert "sslmode=verify-full" in environment["CLOISTER_DATABASE_URL"]
    assert not {"PGPASSFILE", "AWS_SHARED_CREDENTIALS_FILE"} & environment.keys()


def egress(stack: Recording, pod: str) -> set[tuple[str, int]]:
    [found] = [each for each in manifests(stack) if (each.kind, each.name) == ("NetworkPolicy", pod)]
    return {
        (peer["ipBlock"]["cidr"], port["port"])
        for rule in found.body["spec"]["egress"]
        for peer in rule["to"]
        if "ipBlock" in peer
        for port in rule["ports"]
    }


def test_pods_reach_their_identity_the_database_and_s3_only(stack: Recording) -> None:
    subnets = {each.name: each.inputs["cidrBlock"] for each in of_kind(stack, "Subnet")}
    found = egress(stack, "api")
    assert ("169.254.170.23/32", 80) in found
    assert (subnets["endpoints-eu-central-1a"], 443) in found
    assert (subnets["database-eu-central-1b"], 5432) in found
    assert ("169.254.170.23/32", 80) not in egress(stack, "ray")
    assert not {cidr for cidr, _ in found} & {"0.0.0.0/0", "10.64.0.0/16"}


def test_nodes_of_a_gpu_pool_start_from_zero(stack: Recording) -> None:
    [pool] = [each.body for each in manifests(stack) if (each.kind, each.name) == ("NodePool", "cloister-a10g")]
    requirements = {each["key"]: each["values"] for each in pool["spec"]["template"]["spec"]["requirements"]}
    assert requirements["node.kubernetes.io/instance-type"] == ["g5.4xlarge"]
    assert pool["spec"]["limits"] == {"cpu": "64", "nvidia.com/gpu": "4"}
    assert pool["spec"]["template"]["metadata"]["labels"] == {"cloister.dev/pool": "a10g"}
    assert pool["spec"]["template"]["spec"]["taints"] == [
        {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    ]
    [node_class] = [each.body for each in manifests(stack) if (each.kind, each.name) == ("NodeClass", "cloister-a10g")]
    assert node_class["spec"]["networkPolicy"] == "DefaultDeny"
    assert node_class["spec"]["ephemeralStorage"]["kmsKeyID"]


@pytest.mark.parametrize("keep_data", [True, False])
def test_data_is_protected_unless_it_may_be_lost(keep_data: bool) -> None:
    recording = preview_values(changed(NAME, keep_data=keep_data), stack_text(NAME).secret_keys)
    kinds = ("Bucket", "Instance", "Cluster", "Repository")
    protected = {each.protect for kind in kinds for each in of_kind(recording, kind)}
    assert protected == {keep_data}
    [database], [cluster] = of_kind(recording, "Instance"), of_kind(recording, "Cluster")
    assert database.inputs["deletionProtection"] is cluster.inputs["deletionProtection"] is keep_data
    assert database.inputs["skipFinalSnapshot"] is not keep_data


def test_kubeconfig_has_no_credential(stack: Recording) -> None:
    config = yaml.safe_load(stack.outputs["kubeconfig"])
    assert config["users"][0]["user"]["exec"]["command"] == "aws"
    assert set(config["users"][0]["user"]) == {"exec"}


def test_another_account_is_refused_and_everything_has_tags(stack: Recording) -> None:
    [provider] = stack.of_type("pulumi:providers:aws")
    assert json.loads(provider.inputs["allowedAccountIds"]) == ["123456789012"]
    tags = json.loads(provider.inputs["defaultTags"])["tags"]
    assert tags["cloister:customer"] == "vela"
    assert {each.provider.rpartition("::")[0] for each in stack.resources if each.type.startswith("aws:")} == {
        provider.urn
    }


def test_missing_instance_type_is_found_before_any_resource_of_the_cluster() -> None:
    text = stack_text(NAME)
    offered = {"instanceTypes": ["m7i.xlarge", "m6i.4xlarge"], "locations": ["eu-central-1a"]}
    answers = {"aws:ec2/getInstanceTypeOfferings:getInstanceTypeOfferings": offered}
    with pytest.raises(Exception, match=r"node_pools.a10g: AWS offers g5.4xlarge in none of eu-central-1a"):
        preview_values(text.values, text.secret_keys, answers)


def test_only_stacks_on_aws_need_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("infra.aws.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pulumi_aws", None)
    text = stack_text(NAME)
    with pytest.raises(Exception, match=r"aws: the package pulumi-aws is not installed: run `.venv-pulumi/bin/pip"):
        # Not from the cache of recordings.
        preview_values(text.values, text.secret_keys, {"none": {}})
    dev = stack_text()
    assert preview_values(dev.values, dev.secret_keys, {"none": {}}).resources


def test_instance_types_have_known_accelerators() -> None:
    assert {each.accelerator for each in INSTANCE_TYPES} <= ACCELERATORS.keys()
    assert len({each.name for each in INSTANCE_TYPES}) == len(INSTANCE_TYPES)
