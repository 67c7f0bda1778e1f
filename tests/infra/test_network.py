from dataclasses import replace
from typing import Any

import pytest

from infra.policy import violations
from infra.rendering.manifests import Manifest
from infra.rendering.network_drawing import BUNDLED, CALICO, CILIUM, CLOUDNATIVE_PG, EXAMPLES, EXTERNAL, drawing
from infra.tenancy.network import NetworkArgs, Networks, Pods, flows
from infra.tenancy.network_policies import policies
from tests.infra.previewed_stacks import STACKS, preview

ALL = (
    *EXAMPLES.values(),
    CALICO,
    replace(CILIUM, ingress_namespace="", ingress_networks=("10.0.0.0/24", "fd00::/64"), ingress_by_cilium=True),
)


def policy(args: NetworkArgs, name: str) -> dict[str, list[dict[str, object]]]:
    (found,) = [each for each in policies(args) if each["metadata"]["name"] == name and "podSelector" in each["spec"]]
    spec: dict[str, list[dict[str, object]]] = found["spec"]
    return spec


@pytest.mark.parametrize("args", ALL)
def test_both_namespaces_deny_all_connections(args: NetworkArgs) -> None:
    denied = [each for each in policies(args) if each["spec"].get("podSelector") == {}]
    assert {each["metadata"]["namespace"] for each in denied} == {"cloister-acme-prod", "cloister-acme-prod-jobs"}
    for each in denied:
        assert each["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert each["spec"]["ingress"] == each["spec"]["egress"] == []


@pytest.mark.parametrize("args", ALL)
def test_policies_allow_each_flow_at_both_ends_and_nothing_else(args: NetworkArgs) -> None:
    both = [flow for flow in flows(args) if not flow.is_within_job]
    rules = [rule for each in policies(args) for side in ("ingress", "egress") for rule in each["spec"].get(side, ())]
    ends = [isinstance(end, Pods) and end.is_of_stack for flow in both for end in (flow.source, flow.target)]
    assert len(rules) == sum(ends)
    for flow in both:
        if isinstance(flow.source, Pods | Networks) and isinstance(flow.target, Pods) and flow.target.is_of_stack:
            opened = policy(args, flow.target.name)["ingress"]
            assert {"from": flow.source.selectors(), **flow.port_list()} in opened


@pytest.mark.parametrize("args", ALL)
def test_every_rule_names_its_peers(args: NetworkArgs) -> None:
    for each in policies(args):
        if "podSelector" not in each["spec"]:
            continue
        for rule in (*each["spec"]["ingress"], *each["spec"]["egress"]):
            peers = rule.get("from") or rule.get("to")
            assert peers
            assert all(peer.get("namespaceSelector", {}).get("matchLabels") or peer.get("ipBlock") for peer in peers)


def test_workers_reach_the_object_store_but_no_database_or_kubernetes() -> None:
    workers = [flow for flow in flows(BUNDLED) if flow.source.name == "ray"]
    assert {flow.target.name for flow in workers} == {"ray", "object-store", "cluster DNS"}


@pytest.mark.parametrize("args", ALL)
def test_no_policy_of_the_program_connects_pods_of_jobs(args: NetworkArgs) -> None:
    for name in ("ray", "ray-head"):
        opened = policy(args, name)
        peers = [peer for rule in opened["ingress"] for peer in rule["from"]]  # type: ignore[attr-defined]
        peers += [peer for rule in opened["egress"] for peer in rule["to"]]  # type: ignore[attr-defined]
        assert args.names.jobs_namespace not in str(peers)


def test_only_heads_reach_the_coordinator_and_no_pod_of_a_job_reaches_the_database() -> None:
    asking = {(flow.source.name, flow.ports) for flow in flows(BUNDLED) if flow.target.name == "coordinator"}
    assert asking == {("ray-head", (8100,)), ("Prometheus", (8101,))}
    connected = {flow.source.name for flow in flows(BUNDLED) if flow.target.name == "database"}
    assert connected == {"api", "reconciler", "coordinator", "migrations"}


def test_export_of_the_audit_log_alone_reaches_the_syslog_server_and_only_if_there_is_one() -> None:
    sending = [flow for flow in flows(CLOUDNATIVE_PG) if flow.target.name == "syslog server"]
    assert [(flow.source.name, flow.ports) for flow in sending] == [("audit-export", (6514,))]
    reached = {flow.target.name for flow in flows(CLOUDNATIVE_PG) if flow.source.name == "audit-export"}
    assert reached == {"syslog server", "database", "cluster DNS"}
    assert "audit-export" not in {flow.source.name for flow in flows(BUNDLED)}


def test_service_alone_reaches_the_collector_of_traces_and_only_if_there_is_one() -> None:
    def sending(args: NetworkArgs) -> list[str]:
        return [flow.source.name for flow in flows(args) if flow.target.name == "OpenTelemetry collector"]

    assert sending(CLOUDNATIVE_PG) == ["api", "reconciler", "coordinator"]
    assert sending(BUNDLED) == []


def test_all_pods_reach_a_dns_cache_on_its_port_only() -> None:
    args = replace(BUNDLED, dns_networks=("169.254.20.10/32",))
    cached = [flow for flow in flows(args) if flow.target.name == "DNS cache"]
    named = [flow for flow in flows(args) if flow.target.name == "cluster DNS"]
    assert {flow.source for flow in cached} == {flow.source for flow in named}
    assert {(flow.ports, flow.protocols) for flow in cached} == {((53,), ("UDP", "TCP"))}


def test_only_reconciler_and_ray_heads_reach_the_api_server() -> None:
    asking = {flow.source.name for flow in flows(BUNDLED) if flow.target.name == "Kubernetes API"}
    assert asking == {"reconciler", "ray-head"}


def test_api_is_reached_by_ingress_and_named_clients_only() -> None:
    assert {flow.source.name for flow in flows(EXTERNAL) if flow.target.name == "api"} == {"ingress controller"}
    assert not [flow for flow in flows(CLOUDNATIVE_PG) if flow.source.name == "ingress controller"]


def of_plugin(args: NetworkArgs) -> dict[str, dict[str, Any]]:
    """The specs of the policies that are no plain NetworkPolicies, by name."""
    return {each["metadata"]["name"]: each["spec"] for each in policies(args) if "podSelector" not in each["spec"]}


@pytest.mark.parametrize("args", ALL)
def test_no_policy_of_a_plugin_is_open(args: NetworkArgs) -> None:
    found = violations([Manifest(body=each) for each in policies(args)])
    assert [str(each) for each in found if each.policy.name == "no_open_flows"] == []


def test_cilium_allows_the_api_server_by_entity_on_its_port_to_those_that_ask_it_only() -> None:
    rule = {"toEntities": ["kube-apiserver"], "toPorts": [{"ports": [{"port": "6443", "protocol": "TCP"}]}]}
    assert [name for name, spec in of_plugin(CILIUM).items() if rule in spec.get("egress", ())] == [
        "reconciler",
        "ray-head",
    ]
    assert all(
        "ipBlock" not in str(policy(CILIUM, name)["egress"]) or "6443" not in str(policy(CILIUM, name))
        for name in ("reconciler", "ray-head")
    )


def test_cilium_reads_the_dns_answers_of_pods_that_reach_named_hosts_and_no_plain_rule_bypasses_it() -> None:
    specs = of_plugin(CILIUM)
    for name, host in (("api", "login.acme.example"), ("reconciler", "hooks.acme.example")):
        assert {"matchName": host} in [each for rule in specs[name]["egress"] for each in rule.get("toFQDNs", ())]
        assert "dns" in str([rule for rule in specs[name]["egress"] if "toEndpoints" in rule])
        assert "'port': 53" not in str(policy(CILIUM, name))
    assert "'port': 53" in str(policy(CILIUM, "coordinator"))


def test_cilium_reaches_a_dns_cache_on_the_node_by_entity() -> None:
    rules = [
        rule
        for spec in of_plugin(CILIUM).values()
        for rule in spec.get("egress", ())
        if "host" in rule.get("toEntities", ())
    ]
    assert rules
    assert all({port["port"] for each in rule["toPorts"] for port in each["ports"]} == {"53"} for rule in rules)


def test_api_accepts_requests_from_controllers_on_nodes_and_from_cilium() -> None:
    ports = [{"ports": [{"port": "8000", "protocol": "TCP"}]}]
    by_cilium = replace(CILIUM, ingress_namespace="", ingress_by_cilium=True)
    assert of_plugin(by_cilium)["api"]["ingress"] == [{"fromEntities": ["ingress"], "toPorts": ports}]
    on_nodes = replace(CILIUM, ingress_namespace="", ingress_networks=("10.0.0.0/24",))
    assert of_plugin(on_nodes)["api"]["ingress"] == [{"fromEntities": ["host", "remote-node"], "toPorts": ports}]
    (rule,) = policy(replace(on_nodes, plugin="kubernetes"), "api")["ingress"]
    assert rule["from"] == [{"ipBlock": {"cidr": "10.0.0.0/24"}}]


def test_calico_allows_the_api_server_by_its_service() -> None:
    specs = of_plugin(CALICO)
    assert set(specs) == {"reconciler", "ray-head"}
    service = {"services": {"name": "kubernetes", "namespace": "default"}}
    assert all(spec["egress"] == [{"action": "Allow", "destination": service}] for spec in specs.values())
    assert specs["ray-head"]["selector"] == "ray.io/node-type == 'head'"


def test_drawing_has_an_arrow_for_each_flow() -> None:
    args = CLOUDNATIVE_PG
    shown = flows(args)
    lines = list(drawing(args.names, shown))
    assert sum("-->" in line for line in lines) == len(shown)


@pytest.mark.parametrize("name", STACKS)
def test_every_pod_has_a_policy(name: str) -> None:
    recording = preview(name)
    plain = recording.of_type("networking.k8s.io/v1:NetworkPolicy")
    chosen = [each.inputs["spec"]["podSelector"].get("matchLabels", {}) for each in plain]
    for kind in ("Deployment", "StatefulSet", "batch/v1:Job", "CronJob"):
        for resource in recording.of_type(kind):
            spec = resource.inputs["spec"]
            labels = spec.get("jobTemplate", {"spec": spec})["spec"]["template"]["metadata"]["labels"].items()
            assert any(selector and selector.items() <= labels for selector in chosen), resource.name
