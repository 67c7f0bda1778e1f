"""Network of nodes: one bridge each, and routes between pods, nodes and Services."""

import ipaddress
import json
import subprocess
from pathlib import Path
from typing import Final

from tests.cluster.control_plane import SERVICE_NETWORK
from tests.cluster.node.layout import NODES, POD_NETWORKS, PREFIX, NodeLayout

# Packets are forwarded between bridges, and packets between two pods of a bridge pass the Services' rules.
SYSCTLS: Final = {"net.ipv4.ip_forward": "1", "net.bridge.bridge-nf-call-iptables": "1"}
CHAIN: Final = "CLOISTER-FORWARD"


def make_bridge(node: NodeLayout) -> None:
    """Create the bridge with the node's address; it is reachable without any pod."""
    _run("ip", "link", "add", node.bridge, "type", "bridge")
    _run("ip", "address", "add", f"{node.address}/24", "dev", node.bridge)
    _run("ip", "link", "set", node.bridge, "up")


def allow_forwarding(node: NodeLayout) -> None:
    """Allow packets between bridges and to Services, even if the machine drops forwarded packets."""
    # Without a default route the machine itself would have no route to Services.
    _run("ip", "route", "add", SERVICE_NETWORK, "dev", node.bridge)
    _run("iptables", "-w", "-N", CHAIN)
    _run("iptables", "-w", "-A", CHAIN, "-i", f"{PREFIX}+", "-o", f"{PREFIX}+", "-j", "ACCEPT")
    _run("iptables", "-w", "-I", "FORWARD", "-j", CHAIN)


def write_pod_network(node: NodeLayout) -> None:
    """Write how containerd assigns addresses to pods: https://www.cni.dev/plugins/current/main/bridge/."""
    bridge = {
        "type": "bridge",
        "bridge": node.bridge,
        "isGateway": True,
        # A pod can reach itself through its Service.
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(node.run / "addresses"),
            "ranges": [[{"subnet": node.pod_network}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    directory = node.state / "cni-networks"
    directory.mkdir()
    network = {"cniVersion": "0.4.0", "name": PREFIX, "plugins": [bridge]}
    (directory / f"{PREFIX}.conflist").write_text(json.dumps(network))


def taken_networks() -> list[str]:
    """Return this machine's routes that overlap with addresses of pods or Services."""
    done = subprocess.run(["ip", "-json", "-4", "route"], check=True, stdout=subprocess.PIPE)
    ours = [ipaddress.ip_network(network) for network in (POD_NETWORKS, SERVICE_NETWORK)]
    routes = [route["dst"] for route in json.loads(done.stdout or b"[]") if route["dst"] != "default"]
    return [route for route in routes if any(ipaddress.ip_network(route).overlaps(network) for network in ours)]


def bridges() -> list[str]:
    """Return the nodes' bridges that exist."""
    return [node.bridge for node in NODES if Path("/sys/class/net", node.bridge).exists()]


def remove_bridge(name: str) -> None:
    """Remove a bridge with its routes and the pods' devices on it.

    A network namespace can outlive its last process by a minute while connections close, and what is left of its device
    could not be recognised as ours.
    """
    for port in Path("/sys/class/net", name, "brif").iterdir():
        done = subprocess.run(["ip", "link", "delete", port.name], capture_output=True, text=True, check=False)
        if done.returncode != 0 and port.exists():
            raise OSError(f"the network device {port.name} cannot be removed: {done.stderr.strip()}")
    _run("ip", "link", "delete", name)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
