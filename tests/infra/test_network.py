from dataclasses import replace

import pytest

from infra.network import NetworkArgs, flows, policies
from infra.network_drawing import bundled_example, cloudnative_pg_example, drawing, external_example
from infra.network_peers import Pods
from tests.infra.previewed_stacks import STACKS, preview

EXAMPLES = (bundled_example(), cloudnative_pg_example(), external_example())


def policy(args: NetworkArgs, name: str) -> dict[str, list[dict[str, object]]]:
    (found,) = [each for each in policies(args) if each["metadata"]["name"] == name]
    spec: dict[str, list[dict[str, object]]] = found["spec"]
    return spec


@pytest.mark.parametrize("args", EXAMPLES)
def test_both_namespaces_deny_everything_both_ways(args: NetworkArgs) -> None:
    denied = [each for each in policies(args) if each["spec"]["podSelector"] == {}]
    assert {each["metadata"]["namespace"] for each in denied} == {"cloister-acme-prod", "cloister-acme-prod-jobs"}
    for each in denied:
        assert each["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert each["spec"]["ingress"] == each["spec"]["egress"] == []


@pytest.mark.parametrize("args", EXAMPLES)
def test_a_flow_is_open_at_both_ends_and_every_rule_is_a_flow(args: NetworkArgs) -> None:
    both = flows(args)
    rules = [rule for each in policies(args) for side in ("ingress", "egress") for rule in each["spec"][side]]
    ends = [isinstance(end, Pods) for flow in both for end in (flow.source, flow.target)]
    assert len(rules) == sum(ends)
    for flow in both:
        if isinstance(flow.target, Pods):
            opened = policy(args, flow.target.name)["ingress"]
            assert {"from": flow.source.selectors(), **flow.port_list()} in opened


@pytest.mark.parametrize("args", EXAMPLES)
def test_no_rule_is_for_everyone(args: NetworkArgs) -> None:
    for each in policies(args):
        for rule in (*each["spec"]["ingress"], *each["spec"]["egress"]):
            peers = rule.get("from") or rule.get("to")
            assert peers
            assert all(peer.get("namespaceSelector", {}).get("matchLabels") or peer.get("ipBlock") for peer in peers)


def test_workers_reach_the_object_store_and_neither_the_database_nor_kubernetes() -> None:
    workers = [flow for flow in flows(bundled_example()) if flow.source.name == "ray"]
    assert {flow.target.name for flow in workers} == {"ray", "object-store", "cluster DNS"}


def test_a_cache_of_names_on_each_node_is_open_to_all_pods_and_on_its_port_only() -> None:
    args = replace(bundled_example(), dns_networks=("169.254.20.10/32",))
    cached = [flow for flow in flows(args) if flow.target.name == "DNS cache"]
    named = [flow for flow in flows(args) if flow.target.name == "cluster DNS"]
    assert {flow.source for flow in cached} == {flow.source for flow in named}
    assert {(flow.ports, flow.protocols) for flow in cached} == {((53,), ("UDP", "TCP"))}


def test_only_the_reconciler_and_ray_heads_reach_the_api_server() -> None:
    asking = {flow.source.name for flow in flows(bundled_example()) if flow.target.name == "Kubernetes API"}
    assert asking == {"reconciler", "ray-head"}


def test_nothing_reaches_the_api_without_an_ingress_or_clients() -> None:
    assert {flow.source.name for flow in flows(external_example()) if flow.target.name == "api"} == {
        "ingress controller"
    }
    assert not [flow for flow in flows(cloudnative_pg_example()) if flow.source.name == "ingress controller"]


def test_the_drawing_has_an_arrow_for_each_flow() -> None:
    args = cloudnative_pg_example()
    shown = flows(args)
    lines = list(drawing(args.names, shown))
    assert sum("-->" in line for line in lines) == len(shown)


@pytest.mark.parametrize("name", STACKS)
def test_every_pod_of_a_stack_has_a_policy_of_its_own(name: str) -> None:
    recording = preview(name)
    chosen = [each.inputs["spec"]["podSelector"].get("matchLabels", {}) for each in recording.of_type("NetworkPolicy")]
    for kind in ("Deployment", "StatefulSet", "batch/v1:Job"):
        for resource in recording.of_type(kind):
            labels = resource.inputs["spec"]["template"]["metadata"]["labels"].items()
            assert any(selector and selector.items() <= labels for selector in chosen), resource.name
