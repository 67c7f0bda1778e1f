"""Files and standard input of the scripts that run on hosts.

Keys of the configuration: https://docs.rke2.io/reference/server_config and https://docs.rke2.io/reference/linux_agent_config.
RKE2 encrypts Secrets in etcd by itself (https://docs.rke2.io/security/secrets_encryption), and ``profile: cis`` sets
``protect-kernel-defaults`` (https://docs.rke2.io/security/hardening_guide). Both are written down, so that the file
shows them.
"""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from infra.stack_file.hosts import HostsSection, MachineSection, rke2_files

SCRIPTS: Final = Path(__file__).parent / "scripts"
_CONFIG: Final = "/etc/rancher/rke2"
_SUPERVISOR_PORT: Final = 9345


def rke2_config(hosts: HostsSection, machine: MachineSection) -> str:
    """Return ``config.yaml`` of a host. It holds no secret."""
    config: dict[str, Any] = {
        "node-name": machine.name,
        "profile": "cis",
        "protect-kernel-defaults": True,
        "token-file": f"{_CONFIG}/token",
    }
    first = hosts.servers[0]
    if machine is not first:
        config["server"] = f"https://{_registration_host(hosts, machine)}:{_SUPERVISOR_PORT}"
    if machine.role == "server":
        addresses = [hosts.api_address] if hosts.api_address else []
        config |= {
            "agent-token-file": f"{_CONFIG}/agent-token",
            "audit-policy-file": f"{_CONFIG}/audit-policy.yaml",
            "cni": hosts.network_plugin,
            "secrets-encryption": True,
            "tls-san": [*addresses, *(server.address for server in hosts.servers)],
            "write-kubeconfig-mode": "0600",
            "kube-apiserver-arg": ["service-account-extend-token-expiration=false"],
        }
    if hosts.registry_mirror:
        config["disable-default-registry-endpoint"] = True
    return yaml.safe_dump(config)


def _registration_host(hosts: HostsSection, machine: MachineSection) -> str:
    """Return the server that a host joins: behind the common address it could be the host itself."""
    if machine.role == "agent":
        return hosts.api_host
    address = hosts.servers[0].address
    return f"[{address}]" if ":" in address else address


def registries(hosts: HostsSection) -> str:
    """Return ``registries.yaml``; empty without a mirror. Source: https://docs.rke2.io/install/private_registry."""
    mirror = hosts.registry_mirror
    if mirror is None:
        return ""
    content: dict[str, Any] = {"mirrors": {"*": {"endpoint": [mirror.url]}}}
    if mirror.ca_certificate:
        host = mirror.url.partition("://")[2].partition("/")[0]
        content["configs"] = {host: {"tls": {"ca_file": f"{_CONFIG}/registry-ca.crt"}}}
    return yaml.safe_dump(content)


def host_settings(hosts: HostsSection, machine: MachineSection) -> dict[str, str]:
    """Return the settings of ``host.sh`` without the tokens."""
    first = machine is hosts.servers[0]
    others = [server.address for server in hosts.servers if server is not machine]
    mirror, distribution = hosts.registry_mirror, hosts.distribution
    return {
        "node_name": machine.name,
        "role": machine.role,
        "version": distribution.version,
        "config": rke2_config(hosts, machine),
        "audit_policy": (SCRIPTS / "audit-policy.yaml").read_text(encoding="utf-8"),
        "registries": registries(hosts),
        "registry_ca": (mirror.ca_certificate or "") if mirror else "",
        "files_sha256": "\n".join(f"{distribution.sha256[file]}  {file}" for file in rke2_files(hosts.network_plugin)),
        "mirror": (distribution.mirror or "").rstrip("/"),
        "peers": " ".join(f"[{each}]" if ":" in each else each for each in others) if first else "",
        "is_first": "yes" if first else "no",
        "nvidia_driver": str(hosts.min_nvidia_driver if machine.nvidia else 0),
    }


def node_settings(machine: MachineSection) -> dict[str, str]:
    """Return the settings of ``node.sh``."""
    metadata = {"name": machine.name, "labels": machine.labels}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
    return {"node_name": machine.name, "manifest": json.dumps(node)}


def script(name: str, settings: Mapping[str, str]) -> str:
    """Return standard input for a shell: assignments of the settings, then a script of this package."""
    assignments = "".join(f"{key}={shlex.quote(value)}\n" for key, value in settings.items())
    return assignments + (SCRIPTS / name).read_text(encoding="utf-8")


def stack_kubeconfig(text: str, *, api_host: str, context: str) -> str:
    """Return RKE2's kubeconfig with the address of the API server and the context of the stack file."""
    text = text.replace("https://127.0.0.1:6443", f"https://{api_host}:6443")
    return re.sub(r"(name|cluster|user|current-context): default$", rf"\1: {context}", text, flags=re.MULTILINE)
