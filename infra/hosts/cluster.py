"""A cluster of bare hosts: each host joins, and leaves again when it is no longer in the stack file.

Pulumi's command provider connects to hosts by SSH (https://www.pulumi.com/registry/packages/command, version 1.2.1). It
passes standard input to the command, keeps it as a secret, and prints the output of a command that fails. It accepts
every host key unless ``host_key`` is set.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pulumi
from pulumi_command import remote

from infra.hosts.configuration import host_settings, node_settings, rke2_config, script, stack_kubeconfig
from infra.stack_file.hosts import HostsSection, MachineSection, rke2_files

# RKE2's images are more than a gigabyte, and a server waits for its API server for ten minutes.
_TIMEOUTS: Final = pulumi.CustomTimeouts(create="60m", update="60m", delete="30m")


class Hosts(pulumi.ComponentResource):
    """Nodes of an RKE2 cluster on the hosts of a stack file.

    Servers join one after another, then all agents at the same time. A host that fails stops the ones that need it, and
    the next `pulumi up` goes on there. Removing a host drains its node before RKE2 is uninstalled.

    Attributes:
        kubeconfig: kubeconfig of the cluster's administrator, a secret. It exists when every host is a node.

    Args:
        name: logical name of the component.
        hosts: the section of the stack file.
        ssh_private_key: private key of the users who log in.
        context: name of the context in the kubeconfig.
        opts: options of the component.
    """

    kubeconfig: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        hosts: HostsSection,
        *,
        ssh_private_key: pulumi.Input[str],
        context: str,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("cloister:hosts:Hosts", name, None, opts)
        self._hosts = hosts
        self._key = ssh_private_key
        servers = hosts.servers
        nodes = [self._join(servers[0], "", "", [])]
        token = self._read("token", nodes)
        agent_token = self._read("agent-token", nodes)
        for server in servers[1:]:
            nodes.append(self._join(server, token, agent_token, nodes[-1:]))
        control_plane = nodes[-1:]
        nodes += [
            self._join(machine, "", agent_token, control_plane) for machine in hosts.machines if machine.role == "agent"
        ]
        text = self._read("kubeconfig", nodes)
        self.kubeconfig = pulumi.Output.secret(
            text.apply(lambda content: stack_kubeconfig(content, api_host=hosts.api_host, context=context))
        )
        self.register_outputs({})

    def _join(
        self,
        machine: MachineSection,
        token: pulumi.Input[str],
        agent_token: pulumi.Input[str],
        after: Sequence[pulumi.Resource],
    ) -> remote.Command:
        """Make a host a node; return the resource that exists when the node is ready."""
        hosts, copies = self._hosts, self._copies(machine, after)
        settings = host_settings(hosts, machine)
        host = self._command(
            f"host-{machine.name}",
            machine,
            actions=("join", "update", "remove"),
            stdin=pulumi.Output.all(token, agent_token).apply(
                lambda tokens: script("host.sh", settings | {"token": tokens[0], "agent_token": tokens[1]})
            ),
            triggers=[hosts.distribution.version, rke2_config(hosts, machine)],
            after=[*after, *copies],
        )
        return self._command(
            f"node-{machine.name}",
            hosts.servers[0],
            actions=("ready", "ready", "drain"),
            stdin=script("node.sh", node_settings(machine)),
            triggers=[machine.labels],
            after=[host],
        )

    def _copies(self, machine: MachineSection, after: Sequence[pulumi.Resource]) -> list[pulumi.Resource]:
        """Copy RKE2's files to the home of the user, unless the host downloads them."""
        distribution = self._hosts.distribution
        if distribution.directory is None:
            return []
        directory = Path(distribution.directory).expanduser()
        return [
            remote.CopyToRemote(
                f"file-{machine.name}-{file}",
                connection=self._connection(machine),
                source=pulumi.FileAsset(str(directory / file)),
                remote_path=f".cloister-rke2/{distribution.version}/{file}",
                opts=pulumi.ResourceOptions(parent=self, depends_on=list(after), custom_timeouts=_TIMEOUTS),
            )
            for file in rke2_files(self._hosts.network_plugin)
        ]

    def _read(self, what: str, after: Sequence[pulumi.Resource]) -> pulumi.Output[str]:
        """Return a secret file of the first server."""
        server = self._hosts.servers[0]
        settings = host_settings(self._hosts, server) | {"token": "", "agent_token": ""}
        command = self._command(
            what,
            server,
            actions=(what, what, ""),
            stdin=script("host.sh", settings),
            triggers=[server.address],
            after=after,
            logging=remote.Logging.NONE,
        )
        return pulumi.Output.secret(command.stdout)

    def _command(
        self,
        name: str,
        machine: MachineSection,
        *,
        actions: tuple[str, str, str],
        stdin: pulumi.Input[str],
        triggers: list[pulumi.Input[object]],
        after: Sequence[pulumi.Resource],
        logging: remote.Logging = remote.Logging.STDERR,
    ) -> remote.Command:
        """Run a script at create, update and delete.

        The command is the shell alone: a list of processes and the message of a failure show neither script nor secret.
        """
        shell = "/bin/sh -s --" if machine.user == "root" else "sudo -n -- /bin/sh -s --"
        create, update, delete = actions
        return remote.Command(
            name,
            connection=self._connection(machine),
            create=f"{shell} {create}",
            update=f"{shell} {update}",
            delete=f"{shell} {delete}" if delete else None,
            stdin=pulumi.Output.secret(stdin),
            triggers=triggers,
            logging=logging,
            # The output of a previous run may be a token, and the environment of a process is readable.
            add_previous_output_in_env=False,
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=list(after),
                additional_secret_outputs=["stdout"],
                custom_timeouts=_TIMEOUTS,
            ),
        )

    def _connection(self, machine: MachineSection) -> remote.ConnectionArgs:
        return remote.ConnectionArgs(
            host=machine.address,
            port=machine.port,
            user=machine.user,
            private_key=self._key,
            host_key=machine.host_key,
            dial_error_limit=3,
        )
