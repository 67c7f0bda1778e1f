"""Bare hosts: the section of the stack file, and the resources that make a cluster of them."""

from collections.abc import Mapping
from typing import Any

import pytest

from infra.stack_file.reading import ConfigError
from tests.infra.previewed_stacks import changed, parse, preview, stack_text

NAME = "bare-hosts"
KEYS = stack_text(NAME).secret_keys


def with_hosts(**keys: Any) -> dict[str, Any]:
    return changed(NAME, hosts={**stack_text(NAME).values["hosts"], **keys})


def machines(*changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the machines of the example, the first ones with changed keys."""
    given = stack_text(NAME).values["hosts"]["machines"]
    return [{**machine, **change} for machine, change in zip(given, [*changes, *[{}] * len(given)], strict=False)]


def problems(values: Mapping[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(values, KEYS)
    return [problem.removeprefix("cloister:") for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"machines": machines({"role": "agent"})}, "hosts.machines: 2 have the role server"),
        ({"machines": [machine | {"role": "agent"} for machine in machines()]}, "hosts.machines: 0 have the role"),
        ({"machines": machines({"address": "10.0.0.12"})}, "hosts.machines[0].address: 10.0.0.12 appears twice"),
        ({"machines": machines({"address": "10.0.0.11:22"})}, "hosts.machines[0].address: must be an IP address"),
        ({"machines": machines({"host_key": "ssh-ed25519 AAAA"})}, "hosts.machines[0].host_key: must be the public"),
        ({"machines": machines({"user": "ops; reboot"})}, "hosts.machines[0].user: must be the name of a Linux user"),
        ({"machines": machines({"labels": {"cloister.dev/pool": "cpu"}})}, "hosts.machines[0].labels: must not begin"),
        ({"machines": machines({"labels": {"a": "b c"}})}, "hosts.machines[0].labels: must be labels"),
        ({"machines": machines()[:5]}, "node_pools.v100.nodes: gpu-2 is not in hosts.machines"),
        ({"network_plugin": "cilium"}, "hosts.distribution.sha256: lacks rke2-images-cilium.linux-amd64.tar.zst"),
        ({"network_plugin": "cilium"}, "network.plugin: is kubernetes, but hosts.network_plugin is cilium"),
        ({"network_plugin": "flannel"}, "hosts.network_plugin: "),
    ],
)
def test_wrong_hosts_are_refused(keys: dict[str, Any], problem: str) -> None:
    assert [found for found in problems(with_hosts(**keys)) if found.startswith(problem)]


def test_all_problems_of_hosts_are_reported_at_once() -> None:
    example = stack_text(NAME).values
    wrong = with_hosts(
        machines=machines({"name": "sys-2", "role": "agent"}),
        distribution={**example["hosts"]["distribution"], "directory": "files"},
    )
    wrong |= {
        "kubernetes": {"context": "umbra", "kubeconfig": "~/.kube/umbra"},
        "node_pools": {**example["node_pools"], "runtime_class": None},
        "ssh_private_key": "",
    }
    found = "\n".join(problems({key: value for key, value in wrong.items() if key != "ssh_private_key"}))
    for expected in (
        "hosts.machines: 2 have",
        "hosts.machines[1].name: sys-2 appears twice",
        "hosts.distribution.directory: set either",
        "kubernetes.kubeconfig: ",
        "node_pools.v100.runtime_class: ",
        "ssh_private_key: is required because of hosts",
    ):
        assert expected in found


def test_key_of_the_hosts_needs_hosts() -> None:
    values = changed("air-gap", ssh_private_key="x")
    with pytest.raises(ConfigError, match="ssh_private_key: belongs to hosts"):
        parse(values, stack_text("air-gap").secret_keys | {"ssh_private_key"})


def test_every_connection_requires_the_host_key() -> None:
    keys = {machine["address"]: machine["host_key"] for machine in machines()}
    commands = preview(NAME).of_type("command:remote:Command")
    assert len(commands) == 2 * len(keys) + 3
    for command in commands:
        connection = command.inputs["connection"]
        assert connection["hostKey"] == keys[connection["host"]]


def test_commands_hold_secrets_in_secret_inputs_only() -> None:
    for command in preview(NAME).of_type("command:remote:Command"):
        assert command.is_secret(("stdin",))
        assert command.is_secret(("connection", "privateKey"))
        assert command.inputs["addPreviousOutputInEnv"] is False
        assert command.inputs["create"].startswith("sudo -n -- /bin/sh -s -- ")
    reading = [preview(NAME).named(name).inputs["logging"] for name in ("token", "agent-token", "kubeconfig")]
    assert reading == ["none"] * 3
    assert ("kubeconfig",) in preview(NAME).secret_outputs


def test_servers_join_one_after_another_and_agents_after_them() -> None:
    recording = preview(NAME)
    before = {
        name: {urn.rpartition("::")[2] for urn in recording.named(f"host-{name}").dependencies}
        for name in ("sys-1", "sys-2", "sys-3", "cpu-1", "gpu-1")
    }
    nodes = {name: {each for each in found if each.startswith("node-")} for name, found in before.items()}
    assert nodes == {
        "sys-1": set(),
        "sys-2": {"node-sys-1"},
        "sys-3": {"node-sys-2"},
        "cpu-1": {"node-sys-3"},
        "gpu-1": {"node-sys-3"},
    }
    assert "agent-token" in before["gpu-1"]
    assert "token" not in before["gpu-1"]


def test_objects_of_the_cluster_wait_until_every_host_is_a_node() -> None:
    recording = preview(NAME)
    kubeconfig = {urn.rpartition("::")[2] for urn in recording.named("kubeconfig").dependencies}
    assert {f"node-{machine['name']}" for machine in machines()} <= kubeconfig
    provider = recording.named("cluster")
    assert "kubeconfig" in {urn.rpartition("::")[2] for urn in provider.dependencies}
    assert provider.is_secret(("kubeconfig",))
