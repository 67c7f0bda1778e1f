"""Policies of Cilium, checked by a real API server with Cilium's own definition."""

from dataclasses import replace
from typing import Any

import pytest

from infra.rendering.network_drawing import CILIUM
from infra.tenancy.network_policies import CILIUM as API_VERSION
from infra.tenancy.network_policies import policies
from service.doctor.preflight.network import stack_policies
from service.doctor.preflight.stack_facts import read_stack_facts
from tests.cluster.api import Answer, ApiError, KubernetesApi
from tests.infra.previewed_stacks import FILES, STACKS

pytestmark = pytest.mark.cluster


def tried(api: KubernetesApi, policy: dict[str, Any]) -> Answer:
    metadata = policy["metadata"] | {"namespace": "default"}
    return api.apply(policy | {"metadata": metadata}, field_manager="test", dry_run=True)


def test_server_accepts_every_kind_of_rule_without_a_warning(api: KubernetesApi) -> None:
    args = replace(CILIUM, ingress_networks=("10.0.0.0/24",), ingress_by_cilium=True)
    own = [each for each in policies(args) if each["apiVersion"] == API_VERSION]
    rules = [rule for each in own for side in ("ingress", "egress") for rule in each["spec"].get(side, ())]
    used = {key for rule in rules for key in rule}
    assert used == {"fromEntities", "toEntities", "toFQDNs", "toEndpoints", "toCIDR", "toPorts"}
    assert [warning for each in own for warning in tried(api, each).warnings] == []


def test_server_accepts_the_policies_of_the_doctor(api: KubernetesApi) -> None:
    facts = replace(read_stack_facts(FILES[STACKS.index("rke2-cilium")]), dns_networks=("169.254.20.10/32",))
    made = stack_policies(facts)
    assert sum(each["apiVersion"] == API_VERSION for each in made) == 3
    assert [warning for each in made for warning in tried(api, each).warnings] == []


@pytest.mark.parametrize(
    "rule",
    [
        {"toEntities": ["everyone"]},
        {"toHosts": ["hooks.acme.example"]},
        {"toFQDNs": [{"matchName": "hooks acme"}]},
        {"toEntities": ["host"], "toPorts": [{"ports": [{"port": "53", "protocol": "DNS"}]}]},
    ],
)
def test_server_refuses_wrong_rules(api: KubernetesApi, rule: dict[str, Any]) -> None:
    wrong = {
        "apiVersion": API_VERSION,
        "kind": "CiliumNetworkPolicy",
        "metadata": {"name": "wrong"},
        "spec": {"endpointSelector": {}, "egress": [rule]},
    }
    with pytest.raises(ApiError):
        tried(api, wrong)
