"""Section of a stack file about bare hosts, and the rules inside it and between it and others.

The program makes an RKE2 cluster of them (ADR 16). Names of RKE2's files: https://docs.rke2.io/install/airgap, at
v1.34.5+rke2r1.
"""

import base64
import binascii
import ipaddress
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from infra.stack_file.values import Certificates, DnsLabel, Port, WebUrl, matching
from service.config_sections import Section, key
from service.model_catalogue import Count

if TYPE_CHECKING:
    from infra.stack_file.cluster_sections import KubernetesSection, NodePoolsSection

_EXAMPLE_KEY: Final = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"
_KEY_TYPES: Final = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa")
_OUR_LABELS: Final = "cloister.dev/"
# A label of a node: https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set.
_LABEL_PART: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_KEY: Final = re.compile(rf"([a-z0-9][-a-z0-9.]{{0,252}}/)?{_LABEL_PART}")
_LABEL_VALUE: Final = re.compile(rf"({_LABEL_PART})?")
NetworkPlugin = Literal["canal", "calico", "cilium"]


def check_address(value: str) -> str:
    """Check an IP address or a host name."""
    try:
        return str(ipaddress.ip_address(value))
    except ValueError as error:
        label = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
        if not re.fullmatch(rf"(?=.{{1,253}}$){label}(\.{label})*", value) or re.fullmatch(r"[\d.]+", value):
            raise ValueError("must be an IP address or a host name, without a port, e.g. 10.0.0.11") from error
        return value


def check_host_key(value: str) -> str:
    """Check the public key of an SSH server, as the second and third column of ``ssh-keyscan``."""
    kind, _, rest = value.partition(" ")
    try:
        content = base64.b64decode(rest.partition(" ")[0], validate=True)
    except binascii.Error:
        content = b""
    # The encoded key begins with the length and the name of its type: RFC 4253, section 6.6.
    if kind not in _KEY_TYPES or content[4 : 4 + len(kind)] != kind.encode():
        raise ValueError(
            "must be the public key of the host's SSH server: the content of /etc/ssh/ssh_host_ed25519_key.pub on it"
        )
    return f"{kind} {rest.partition(' ')[0]}"


def check_labels(value: dict[str, str]) -> dict[str, str]:
    """Check labels of a node, none of which the program sets itself."""
    for name, text in value.items():
        if not _LABEL_KEY.fullmatch(name) or not _LABEL_VALUE.fullmatch(text):
            raise ValueError("must be labels of Kubernetes: at most 63 letters, digits, '-', '_' and '.' each")
        if name.startswith(_OUR_LABELS):
            raise ValueError(f"must not begin with {_OUR_LABELS}: node_pools sets these labels")
    return value


Address = Annotated[str, AfterValidator(check_address)]
HostKey = Annotated[str, AfterValidator(check_host_key)]
Labels = Annotated[dict[str, str], AfterValidator(check_labels)]
Rke2Version = Annotated[
    str, AfterValidator(matching(r"v1\.\d+\.\d+\+rke2r\d+", "must be a release of RKE2, e.g. v1.34.5+rke2r1"))
]
Sha256 = Annotated[str, AfterValidator(matching(r"[0-9a-f]{64}", "must be a SHA-256 digest: 64 hexadecimal digits"))]
UserName = Annotated[str, AfterValidator(matching(r"[a-z_][-a-z0-9_]{0,31}", "must be the name of a Linux user"))]


class MachineSection(Section):
    """One host. Give a machine with another address another name: it is another node."""

    name: DnsLabel = key("name of the node in the cluster", "gpu-1")
    address: Address = key("where SSH and the other hosts reach it", "10.0.0.21")
    host_key: HostKey = key("public key of its SSH server, by which the program recognizes it", _EXAMPLE_KEY)
    role: Literal["server", "agent"] = key(
        "`server` runs the control plane and etcd, `agent` pods only", "agent", default="agent"
    )
    user: UserName = key("user who logs in: root, or one who may use sudo without a password", "ops", default="root")
    port: Port = key("port of its SSH server", 2222, default=22)
    labels: Labels = key("labels of the node", {"acme.example/rack": "r1"}, default={})
    nvidia: bool = key("has NVIDIA GPUs; driver and Container Toolkit must be installed", True, default=False)


class DistributionSection(Section):
    """The release of RKE2 and its files for Linux on x86-64."""

    version: Rke2Version = key("the release", "v1.34.5+rke2r1")
    directory: str | None = key(
        "directory with the files on the machine that runs `pulumi up`; this or `mirror`", "rke2-files", default=None
    )
    mirror: WebUrl | None = key(
        "URL below which the hosts find the files", "https://files.acme.example/rke2", default=None
    )
    sha256: dict[str, Sha256] = key(
        "SHA-256 digest of each file; hosts install nothing else", {"install.sh": "0123456789abcdef" * 4}
    )


class RegistryMirrorSection(Section):
    """The registry that nodes ask for the images of all registries."""

    url: WebUrl = key("its URL", "https://registry.acme.example")
    ca_certificate: Certificates | None = key(
        "certificate of its private authority, PEM", "-----BEGIN CERTIFICATE-----…", default=None
    )


class HostsSection(Section):
    """Bare hosts of which the program makes the stack's cluster, with RKE2."""

    machines: Annotated[list[MachineSection], Field(min_length=1)] = key(
        "the hosts, the first server first; to add or remove one, change the list", []
    )
    distribution: DistributionSection = key("see below", {})
    network_plugin: NetworkPlugin = key(
        "the network plugin; all three enforce NetworkPolicies", "cilium", default="canal"
    )
    api_address: Address | None = key(
        "address that leads to all servers, on ports 6443 and 9345: of a load balancer, or a DNS name with all "
        "addresses; without it the first server's",
        "k8s.acme.example",
        default=None,
    )
    registry_mirror: RegistryMirrorSection | None = key("see below", {}, default=None)
    min_nvidia_driver: Count = key("oldest major version of the NVIDIA driver that a host may have", 570, default=580)

    @property
    def servers(self) -> list[MachineSection]:
        """The servers in the order of the file."""
        return [machine for machine in self.machines if machine.role == "server"]

    @property
    def api_host(self) -> str:
        """Address of the API server and of the registration of nodes, in brackets if it is an IPv6 address."""
        address = self.api_address or self.servers[0].address
        return f"[{address}]" if ":" in address else address


def rke2_files(network_plugin: NetworkPlugin) -> tuple[str, ...]:
    """Return the names of the files that hosts install."""
    images = (f"rke2-images-{part}.linux-amd64.tar.zst" for part in ("core", network_plugin))
    return ("install.sh", "rke2.linux-amd64.tar.gz", "sha256sum-amd64.txt", *images)


def host_rules(sections: Mapping[str, Any]) -> Iterator[str]:
    """Check the hosts against each other, and what other sections say about the cluster of hosts."""
    hosts: HostsSection | None = sections.get("hosts")
    if hosts is None:
        return
    count = len(hosts.servers)
    if count % 2 == 0:
        yield (
            f"hosts.machines: {count} have the role server; the cluster's database needs an odd number. Keep at least "
            "one, better 3"
        )
    for name in ("name", "address"):
        given = Counter(getattr(machine, name) for machine in hosts.machines)
        for index, machine in enumerate(hosts.machines):
            if given[getattr(machine, name)] > 1:
                yield f"hosts.machines[{index}].{name}: {getattr(machine, name)} appears twice; each host has its own"
    distribution, needed = hosts.distribution, rke2_files(hosts.network_plugin)
    if bool(distribution.directory) == bool(distribution.mirror):
        yield "hosts.distribution.directory: set either directory or mirror"
    if distribution.mirror and urlsplit(distribution.mirror).scheme == "oci":
        yield "hosts.distribution.mirror: must begin with https:// or http://; hosts download files from it"
    if missing := [file for file in needed if file not in distribution.sha256]:
        yield f"hosts.distribution.sha256: lacks {', '.join(missing)}; sha256sum prints the digests"
    if unknown := sorted(set(distribution.sha256) - set(needed)):
        yield f"hosts.distribution.sha256: {', '.join(unknown)} is not a file of {hosts.network_plugin}; remove it"
    kubernetes: KubernetesSection | None = sections.get("kubernetes")
    if kubernetes and kubernetes.kubeconfig:
        yield "kubernetes.kubeconfig: the cluster is made of hosts, which have the kubeconfig; remove this key"
    yield from _pool_rules(hosts, sections.get("node_pools"))


def _pool_rules(hosts: HostsSection, pools: "NodePoolsSection | None") -> Iterator[str]:
    """Check that the nodes of pools are hosts, and that pods get the GPUs of hosts."""
    if pools is None:
        return
    names = {machine.name for machine in hosts.machines}
    named = {"system": pools.system, "cpu": pools.cpu, **pools.gpu_pools}
    for name, pool in named.items():
        for node in (pool and pool.nodes) or ():
            if node not in names:
                yield f"node_pools.{name}.nodes: {node} is not in hosts.machines; add the host, or correct the name"
    for name, gpu_pool in pools.gpu_pools.items():
        if not (gpu_pool.runtime_class or pools.runtime_class):
            yield (
                f"node_pools.{name}.runtime_class: is required with hosts: RKE2 gives GPUs to pods of a RuntimeClass "
                "only; set node_pools.runtime_class to nvidia"
            )
