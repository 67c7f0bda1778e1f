"""Bare hosts become a cluster, with Pulumi's real engine and real SSH servers."""

import functools
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pulumi
import pytest
import yaml
from pulumi import automation

from infra.hosts.cluster import Hosts
from infra.stack_file.hosts import HostsSection
from tests.cluster.command_provider import command_provider
from tests.cluster.dev_stack import collect_failed_programs, failed_programs_collected
from tests.cluster.ssh_hosts import VERSION, Lab, lacking, ssh_hosts

pytestmark = [
    pytest.mark.cluster,
    # Pulumi's Automation API leaves the event loop of a failed program to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NAMES: Final = ("s1", "a1", "a2", "a3")


@dataclass(kw_only=True)
class HostStack:
    """A stack of hosts; change ``machines`` before the next `up`."""

    lab: Lab
    options: automation.LocalWorkspaceOptions
    machines: list[dict[str, Any]]
    sha256: dict[str, str]
    output: list[str] = field(default_factory=list)

    def _program(self) -> None:
        distribution = {"version": VERSION, "directory": str(self.lab.files), "sha256": self.sha256}
        hosts = HostsSection.model_validate({"machines": self.machines, "distribution": distribution})
        key = pulumi.Output.secret(self.lab.private_key)
        pulumi.export("kubeconfig", Hosts("hosts", hosts, ssh_private_key=key, context="lab").kubeconfig)

    @functools.cached_property
    def stack(self) -> automation.Stack:
        return automation.create_or_select_stack(
            stack_name="dev", project_name="hosts", program=self._program, opts=self.options
        )

    def up(self) -> automation.OutputMap:
        with failed_programs_collected():
            return self.stack.up(on_output=self.output.append).outputs

    def failure(self) -> str:
        with pytest.raises(automation.CommandError) as caught:
            self.up()
        self.output.append(str(caught.value))
        return str(caught.value)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if reason := lacking():
        pytest.skip(reason)
    with ssh_hosts(tmp_path_factory.mktemp("hosts"), NAMES) as running:
        yield running


@pytest.fixture(scope="module")
def hosts(lab: Lab, programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostStack]:
    """One stack for all tests, which follow the order of a cluster's life."""
    directory = tmp_path_factory.mktemp("pulumi")
    with command_provider() as port:
        is_real = shutil.which("pulumi-resource-command") is not None
        stand_in = {} if is_real else {"PULUMI_DEBUG_PROVIDERS": f"command:{port}"}
        options = automation.LocalWorkspaceOptions(
            work_dir=str(directory),
            pulumi_home=str(directory / "home"),
            pulumi_command=automation.PulumiCommand(root=str(programs)),
            project_settings=automation.ProjectSettings(
                name="hosts", runtime="python", backend=automation.ProjectBackend(url=f"file://{directory}")
            ),
            env_vars=stand_in
            | {
                "PULUMI_CONFIG_PASSPHRASE": "of no interest",
                "PULUMI_SKIP_UPDATE_CHECK": "true",
                "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
                "PULUMI_AUTOMATION_API_SKIP_VERSION_CHECK": "true",
                "PATH": os.environ["PATH"],
            },
        )
        machines = [lab.machine("s1", role="server"), lab.machine("a1"), lab.machine("a2")]
        yield HostStack(lab=lab, options=options, machines=machines, sha256=lab.digests())
        collect_failed_programs()


def secrets_of(lab: Lab) -> list[str]:
    tokens = [(lab.shared / name).read_text().strip().rpartition(":")[2] for name in ("secret-server", "secret-agent")]
    return [*tokens, lab.private_key.splitlines()[1], "c2VjcmV0LWtleQ=="]


def test_host_with_another_key_is_refused(hosts: HostStack) -> None:
    right = hosts.machines[0]
    hosts.machines[0] = {**right, "host_key": hosts.machines[1]["host_key"]}
    assert "host key" in hosts.failure().lower()
    hosts.machines[0] = right
    assert hosts.lab.log() == []


def test_file_with_another_digest_is_refused_before_anything_changes(hosts: HostStack) -> None:
    right = dict(hosts.sha256)
    hosts.sha256["install.sh"] = "0" * 64
    assert "install.sh: FAILED" in hosts.failure()
    hosts.sha256.update(right)
    assert hosts.lab.log() == []
    assert not hosts.lab.exists("s1", "/etc/rancher")


def test_all_that_is_wrong_with_a_host_is_reported_before_anything_changes(hosts: HostStack) -> None:
    hosts.lab.on("s1", "touch", "/etc/wrong-clock")
    right = hosts.machines[0]
    hosts.machines[0] = {**right, "nvidia": True}
    failure = hosts.failure()
    hosts.lab.on("s1", "rm", "/etc/wrong-clock")
    hosts.machines[0] = right
    assert "clock is not synchronized" in failure
    assert "no NVIDIA driver is loaded" in failure
    assert not hosts.lab.exists("s1", "/etc/rancher")


def test_host_that_fails_halfway_leaves_the_others_and_joins_at_the_next_run(hosts: HostStack) -> None:
    broken = hosts.lab.shared / "broken-a2"
    broken.touch()
    assert "rke2-agent does not start" in hosts.failure()
    first = hosts.lab.log()
    assert first[:2] == ["install s1 server", "start s1"]
    assert set(first[2:]) == {"install a1 agent", "start a1", "install a2 agent", "start a2"}
    assert hosts.lab.nodes() == ["a1", "s1"]
    broken.unlink()
    outputs = hosts.up()
    # The files that were installed stay.
    assert hosts.lab.log() == ["start a2"]
    assert hosts.lab.nodes() == ["a1", "a2", "s1"]
    assert outputs["kubeconfig"].secret
    kubeconfig = yaml.safe_load(outputs["kubeconfig"].value)
    assert kubeconfig["clusters"][0]["cluster"]["server"] == f"https://{hosts.lab.address('s1')}:6443"
    assert kubeconfig["current-context"] == kubeconfig["contexts"][0]["name"] == "lab"


def test_configuration_is_hardened_and_secrets_are_files_of_root(hosts: HostStack) -> None:
    config = yaml.safe_load((hosts.lab.shared / "config-s1").read_text())
    assert (config["profile"], config["protect-kernel-defaults"], config["secrets-encryption"]) == ("cis", True, True)
    assert (config["cni"], config["write-kubeconfig-mode"]) == ("canal", "0600")
    assert "server" not in config
    modes = (hosts.lab.shared / "modes-s1").read_text()
    for name in ("agent-token", "audit-policy.yaml", "config.yaml", "token"):
        assert f"-rw------- 1 root root {name}" in " ".join(re.sub(r"( root) +\d+ +", r"\1 ", modes).split())
    agent = yaml.safe_load((hosts.lab.shared / "config-a1").read_text())
    assert agent["server"] == f"https://{hosts.lab.address('s1')}:9345"
    assert "audit-policy-file" not in agent
    # Root of an agent, which runs pods of customers, cannot join another server.
    tokens = {name: hosts.lab.on(name, "cat", "/etc/rancher/rke2/token") for name in ("s1", "a1")}
    assert tokens["a1"].startswith("K10")
    assert tokens["s1"].strip() not in tokens["a1"]


def test_unchanged_list_changes_nothing(hosts: HostStack) -> None:
    with failed_programs_collected():
        summary = hosts.stack.preview().change_summary
    assert {str(kind) for kind in summary} <= {"same", "OpType.SAME"}


def test_added_host_joins_and_removed_host_is_drained_and_uninstalled(hosts: HostStack) -> None:
    hosts.machines.append(hosts.lab.machine("a3", labels={"acme.example/rack": "r1"}))
    hosts.up()
    assert hosts.lab.log() == ["install a3 agent", "start a3"]
    assert '"acme.example/rack": "r1"' in (hosts.lab.shared / "applied").read_text()
    hosts.machines = [machine for machine in hosts.machines if machine["name"] != "a1"]
    hosts.up()
    assert hosts.lab.log() == ["drain a1", "delete a1", "uninstall a1"]
    assert not hosts.lab.exists("a1", "/etc/rancher/rke2")
    assert hosts.lab.nodes() == ["a2", "a3", "s1"]


def test_new_machine_does_not_take_over_the_name_of_another_one(hosts: HostStack) -> None:
    right = hosts.machines[-1]
    hosts.machines[-1] = {**hosts.lab.machine("a1"), "name": "a3"}
    assert "a new machine needs a new name" in hosts.failure()
    hosts.machines[-1] = right
    assert hosts.lab.log() == []


def test_new_server_before_the_first_one_starts_no_second_cluster(hosts: HostStack) -> None:
    before = hosts.machines
    hosts.machines = [hosts.lab.machine("a1", role="server"), *before]
    assert "list new servers after it" in hosts.failure()
    hosts.machines = before
    hosts.up()
    assert hosts.lab.nodes() == ["a2", "a3", "s1"]


def test_destroy_removes_everything(hosts: HostStack) -> None:
    hosts.lab.log()
    hosts.stack.destroy(on_output=hosts.output.append)
    log = hosts.lab.log()
    assert log.index("uninstall a2") < log.index("uninstall s1")
    assert "drain s1" not in log
    assert hosts.lab.nodes() == []


def test_no_secret_was_printed_or_in_a_list_of_processes(hosts: HostStack) -> None:
    processes = (hosts.lab.shared / "processes").read_text()
    assert "/bin/sh -s -- join" in processes
    output = "\n".join(hosts.output)
    assert "host-a2" in output
    for secret in secrets_of(hosts.lab):
        assert secret not in processes
        assert secret not in output
    state = next((Path(hosts.options.work_dir or "") / ".pulumi").rglob("dev.json.bak")).read_text()
    assert not any(secret in state for secret in secrets_of(hosts.lab))
