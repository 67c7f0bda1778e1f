"""``cloister doctor`` checks what the program creates; the service cannot import the program."""

import re

import pytest

from ray_job.contract.cluster import API, API_PORT, RECONCILER
from service.doctor import permissions
from tests.infra.previewed_stacks import STACKS, preview


def resource(kind: str) -> str:
    """``kubernetes:apps/v1:Deployment`` → ``deployments.apps``."""
    _, version, name = kind.split(":")
    group = version.partition("/")[0] if version.partition("/")[0] != "core" else ""
    plural = re.sub(r"(?<=[^aeiou])y$", "ie", name.removesuffix("Patch").lower())
    plural += "es" if plural.endswith("ss") else "s"
    return f"{plural}.{group}" if group else plural


@pytest.mark.parametrize("name", STACKS)
def test_permissions_cover_every_kind_that_a_stack_creates(name: str) -> None:
    asked = {*permissions.EVERYWHERE, *permissions.IN_NAMESPACES, *permissions.ONCE_A_CLUSTER}
    kinds = {each.type for each in preview(name).resources if each.custom and each.type.startswith("kubernetes:")}
    assert {resource(kind) for kind in kinds if ":helm.sh/" not in kind} - asked == set()


def egress_ports(component: str) -> set[int]:
    return {
        port["port"]
        for each in preview("dev").of_type("NetworkPolicy")
        if each.inputs["metadata"]["name"] == component and "jobs" not in each.inputs["metadata"]["namespace"]
        for rule in each.inputs["spec"]["egress"]
        for port in rule["ports"]
    }


def test_policies_close_the_ports_that_the_doctor_expects_closed() -> None:
    assert egress_ports(API)
    assert 6443 not in egress_ports(API)
    assert egress_ports(RECONCILER)
    assert API_PORT not in egress_ports(RECONCILER)
