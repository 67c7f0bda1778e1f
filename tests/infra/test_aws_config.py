"""Stack files of AWS: wrong ones are refused with all their problems, before any resource."""

from collections.abc import Mapping
from typing import Any

import pytest

from infra.stack_file.reading import ConfigError
from tests.infra.previewed_stacks import AWS_STACK as NAME
from tests.infra.previewed_stacks import changed, parse, stack_text

KEYS = stack_text(NAME).secret_keys
AWS = stack_text(NAME).values["aws"]
POOLS = stack_text(NAME).values["node_pools"]
SUBNETS = [
    {"id": f"subnet-0123456789abcde{index}", "zone": zone, "cidr": f"10.64.{index}.0/24"}
    for index, zone in enumerate(AWS["zones"])
]


def existing(**keys: Any) -> dict[str, Any]:
    vpc = {"existing": {"id": "vpc-0123456789abcdef0", "subnets": SUBNETS, **keys}}
    return {"aws": {**AWS, "vpc": vpc, "attachments": []}}


def problems(values: Mapping[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(values, KEYS)
    return [problem.removeprefix("cloister:") for problem in caught.value.problems]


def attached(cidr: str) -> dict[str, Any]:
    return {"attachments": [{"id": "pcx-0123456789abcdef0", "networks": [cidr]}]}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"aws": AWS | {"account_id": "12345"}}, "aws.account_id: must be 12 digits"),
        ({"aws": AWS | {"zones": ["eu-west-1a", *AWS["zones"][1:]]}}, "aws.zones[0]: eu-west-1a is not a zone of"),
        ({"aws": AWS | {"zones": ["eu-central-1a"] * 3}}, "aws.zones: must name three zones; eu-central-1a"),
        ({"aws": AWS | {"vpc": {}}}, "aws.vpc: must have one of cidr and existing"),
        ({"aws": AWS | {"vpc": {"cidr": "10.64.0.0/24"}}}, "aws.vpc.cidr: must be from /16 to /20"),
        ({"aws": AWS | {"vpc": {"cidr": "172.20.0.0/16"}}}, "aws.vpc.cidr: 172.20.0.0/16 overlaps with 172.20.0.0/16"),
        ({"aws": AWS | attached("10.64.5.0/24")}, "aws.vpc.cidr: 10.64.0.0/16 overlaps with 10.64.5.0/24"),
        (
            {"aws": AWS | {"attachments": [attached("10.8.0.0/16")["attachments"][0] | {"id": "tgw-0"}]}},
            "aws.attachments[0].id: must be",
        ),
        ({"aws": AWS | {"administrators": ["ops"]}}, "aws.administrators[0]: must be the ARN"),
        (existing(subnets=SUBNETS[:2]), "aws.vpc.existing.subnets: "),
        (existing(subnets=[SUBNETS[0], SUBNETS[0], SUBNETS[2]]), "aws.vpc.existing.subnets: must be one in each zone"),
        ({"aws": AWS | {"pools": {"l4": {}}}}, "aws.pools.l4: node_pools has no pool of this name"),
        ({"aws": AWS | {"pools": {"a10g": {"capacity": "reserved"}}}}, "aws.pools.a10g.reservations: belongs to"),
        ({"aws": AWS | {"pools": {"a10g": {"instance_types": ["g9.xlarge"]}}}}, "aws.pools.a10g.instance_types: g9"),
        ({"node_pools": POOLS | {"a10": POOLS["a10g"]}}, "node_pools.a10: AWS has no instance type"),
        ({"node_pools": POOLS | {"a10g": POOLS["a10g"] | {"gpus_per_node": 2}}}, "node_pools.a10g: no instance type"),
        ({"node_pools": POOLS | {"a10g": POOLS["a10g"] | {"memory_gib": 900}}}, "node_pools.a10g: no instance type"),
        (
            {"node_pools": POOLS | {"cpu": {"nodes": ["cpu-1"], "cpus": 14, "memory_gib": 56}}},
            "node_pools.cpu.nodes: AWS creates the nodes",
        ),
        ({"database": None}, "database.kind: bundled needs volumes"),
        ({"object_store": {"kind": "bundled"}}, "object_store.kind: bundled needs volumes"),
        ({"aws": None}, "database.kind: aws needs the section aws"),
        ({"network": {"plugin": "cilium"}}, "network.plugin: must be kubernetes with aws"),
        ({"device_plugin": {"install": True}}, "device_plugin.install: nodes of EKS Auto Mode have"),
        ({"model_weights": {"kind": "object_store"}}, "model_weights.kind: object_store needs a key"),
        ({"kubernetes": {"context": "vela-prod", "kubeconfig": "~/.kube/c"}}, "kubernetes.kubeconfig: the cluster is"),
        ({"kubernetes": {"context": "Vela_prod"}}, "kubernetes.context: names the cluster"),
        (
            {
                "images": stack_text(NAME).values["images"] | {"mirror": "registry.acme.example"},
                "aws": AWS | {"attachments": []},
            },
            "images.service: is not in the registry",
        ),
        ({"database_owner_password": "x"}, "database_owner_password: belongs to a database.kind other than aws"),
    ],
)
def test_wrong_stack_file_is_refused(keys: dict[str, Any], problem: str) -> None:
    assert [found for found in problems(changed(NAME, **keys)) if found.startswith(problem)]


def test_customer_on_a_platform_names_its_database_and_bucket() -> None:
    values = changed("customer-acme", database=stack_text(NAME).values["database"], object_store={"kind": "aws"})
    with pytest.raises(ConfigError) as caught:
        parse(values, stack_text("customer-acme").secret_keys)
    found = "\n".join(caught.value.problems)
    assert "database.kind: aws needs the section aws" in found
    assert "object_store.kind: aws needs the section aws" in found


def test_all_problems_are_reported_at_once() -> None:
    hosts = stack_text("bare-hosts").values["hosts"]
    wrong = changed(
        NAME,
        aws=AWS | {"zones": ["us-east-1a", *AWS["zones"][1:]], "vpc": {"cidr": "10.8.0.0/16"}},
        hosts=hosts,
        node_pools=POOLS | {"a10g": POOLS["a10g"] | {"gpus_per_node": 3}},
        object_store={"kind": "bundled"},
    )
    found = "\n".join(problems(wrong))
    for expected in ("aws.zones[0]: ", "aws.vpc.cidr: 10.8.0.0/16 overlaps", "hosts: the cluster is one of EKS"):
        assert expected in found
    for expected in ("node_pools.a10g: no instance type", "object_store.kind: bundled", "ssh_private_key: is required"):
        assert expected in found


def test_smallest_instance_types_of_a_pool_are_chosen() -> None:
    config = parse(stack_text(NAME).values, KEYS)
    assert config.file.aws is not None
    types = {name: [each.name for each in config.file.aws.instance_types(pool)] for name, pool in config.pools.items()}
    assert types == {
        "system": ["m7i.xlarge", "m6i.xlarge"],
        "cpu": ["m7i.4xlarge", "m6i.4xlarge"],
        "a10g": ["g5.4xlarge"],
    }


def test_v100_runs_on_p3dn() -> None:
    v100 = {"max_nodes": 1, "gpus_per_node": 8, "cpus": 90, "memory_gib": 600}
    config = parse(changed(NAME, node_pools=POOLS | {"v100": v100}), KEYS)
    assert config.file.aws is not None
    assert [each.name for each in config.file.aws.instance_types(config.pools["v100"])] == ["p3dn.24xlarge"]


def test_existing_vpc_gives_its_subnets_to_policies() -> None:
    config = parse(changed(NAME, **existing()), KEYS)
    assert config.file.network.kubernetes_api.networks == [each["cidr"] for each in SUBNETS]
    assert config.file.network.kubernetes_api.port == 443
