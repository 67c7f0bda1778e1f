"""What `cloister doctor` looks for is what the program makes; the service cannot import the program."""

import re

import pytest

from infra import kuberay, network, pools
from infra.access import API, LAUNCHER_RULES, RECONCILER
from service.cli.doctor import launcher, nodes, permissions, relay, requirements
from tests.infra.previewed_stacks import STACKS, preview


def resource(kind: str) -> str:
    """``kubernetes:apps/v1:Deployment`` → ``deployments.apps``."""
    _, version, name = kind.split(":")
    group = version.partition("/")[0] if version.partition("/")[0] != "core" else ""
    plural = re.sub(r"(?<=[^aeiou])y$", "ie", name.removesuffix("Patch").lower())
    plural += "es" if plural.endswith("ss") else "s"
    return f"{plural}.{group}" if group else plural


@pytest.mark.parametrize("name", STACKS)
def test_the_doctor_asks_for_the_right_to_everything_that_a_stack_makes(name: str) -> None:
    asked = {*permissions.EVERYWHERE, *permissions.IN_NAMESPACES, *permissions.ONCE_A_CLUSTER}
    kinds = {each.type for each in preview(name).resources if each.custom and each.type.startswith("kubernetes:")}
    assert {resource(kind) for kind in kinds if ":helm.sh/" not in kind} - asked == set()


def test_the_doctor_asks_for_the_rights_that_the_launcher_has() -> None:
    given = {
        (verb, ".".join(part for part in (kind, group) if part))
        for rule in LAUNCHER_RULES
        for verb in rule["verbs"]
        for kind in rule["resources"]
        for group in rule["api_groups"]
    }
    assert set(launcher.MUST) == given


def test_the_doctor_and_the_program_mean_the_same_pools_and_versions() -> None:
    assert (nodes.POOL_LABEL, nodes.GPU_RESOURCE) == (pools.POOL_LABEL, pools.GPU_RESOURCE)
    assert nodes.GPU_POOLS == pools.GPU_POOLS
    assert kuberay.MIN_VERSION == requirements.OLDEST_KUBERAY
    assert relay.DEPLOYMENTS == (RECONCILER, API)


def test_no_flow_leads_where_the_doctor_wants_no_way() -> None:
    (policy,) = [
        each.inputs["spec"]
        for each in preview("dev").of_type("NetworkPolicy")
        if each.inputs["metadata"]["name"] == API and "jobs" not in each.inputs["metadata"]["namespace"]
    ]
    ports = {port["port"] for rule in policy["egress"] for port in rule["ports"]}
    assert 6443 not in ports
    assert network.API_PORT not in {
        port["port"]
        for each in preview("dev").of_type("NetworkPolicy")
        if each.inputs["metadata"]["name"] == RECONCILER
        for rule in each.inputs["spec"]["egress"]
        for port in rule["ports"]
    }
