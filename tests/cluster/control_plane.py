"""A real Kubernetes control plane on this machine's loopback: etcd, API server, controller manager, scheduler.

Everything it writes is in one directory, and every process it starts is ended with it. There is no kubelet: pods are
admitted and bound to the nodes of ``nodes.py``, and never run.
"""

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from tests.cluster import kuberay
from tests.cluster.access import CONTROLLER_MANAGER, OPERATOR, SCHEDULER, Access, make_access
from tests.cluster.api import KubernetesApi
from tests.cluster.processes import Process

_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlane:
    """A running cluster.

    Attributes:
        bin: the directory of the programs.
        directory: everything that it writes.
        server: the API server's URL.
        ca_file: of the API server's certificate.
        access: who may talk to it.
        kubeconfig: the administrator's.
    """

    bin: Path
    directory: Path
    server: str
    ca_file: Path
    access: Access
    kubeconfig: Path


@contextmanager
def control_plane(programs: Path, directory: Path) -> Iterator[ControlPlane]:
    """Runs a new, empty cluster.

    Args:
        programs: what ``build.py`` made.
        directory: an empty one of its own.
    """
    access = make_access(directory)
    etcd_port, etcd_peers, port, manager_port, scheduler_port = _free_ports(5)
    cluster = ControlPlane(
        bin=programs,
        directory=directory,
        server=f"https://{_LOOPBACK}:{port}",
        ca_file=directory / "apiserver" / "apiserver.crt",
        access=access,
        kubeconfig=access.kubeconfig(f"https://{_LOOPBACK}:{port}", directory / "apiserver" / "apiserver.crt"),
    )
    with ExitStack() as stack:
        etcd_url = f"http://{_LOOPBACK}:{etcd_port}"
        stack.enter_context(_etcd(cluster, etcd_url, f"http://{_LOOPBACK}:{etcd_peers}"))
        stack.enter_context(_api_server(cluster, etcd_url, port))
        stack.enter_context(_controller_manager(cluster, manager_port))
        stack.enter_context(_scheduler(cluster, scheduler_port))
        yield cluster


def kuberay_operator(cluster: ControlPlane) -> Process:
    """KubeRay's operator, outside of the cluster; the CRDs must be there."""
    metrics, probes = _free_ports(2)
    kubeconfig = cluster.access.kubeconfig(cluster.server, cluster.ca_file, user=OPERATOR)
    command = kuberay.operator_command(cluster.bin, kubeconfig, metrics_port=metrics, probe_port=probes)
    log = cluster.directory / "ray-operator.log"
    # Its client reads credentials from a kubeconfig only by this flag or this variable.
    environment = {"KUBECONFIG": str(kubeconfig), "HOME": str(cluster.directory)}
    return Process(command, log=log, environment=environment, is_ready=_answers(f"http://{_LOOPBACK}:{probes}/readyz"))


def _etcd(cluster: ControlPlane, url: str, peer_url: str) -> Process:
    command = [
        str(cluster.bin / "etcd"),
        f"--data-dir={cluster.directory / 'etcd'}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
        f"--initial-cluster=default={peer_url}",
        # Nothing here outlives the run, so nothing need be safe from a power failure.
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]
    return Process(command, log=cluster.directory / "etcd.log", is_ready=_answers(f"{url}/health"))


def _api_server(cluster: ControlPlane, etcd_url: str, port: int) -> Process:
    key = cluster.access.service_account_key
    command = [
        str(cluster.bin / "kube-apiserver"),
        f"--etcd-servers={etcd_url}",
        f"--bind-address={_LOOPBACK}",
        f"--secure-port={port}",
        f"--cert-dir={cluster.ca_file.parent}",
        f"--token-auth-file={cluster.access.token_file}",
        "--authorization-mode=RBAC",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--allow-privileged",
        # A loopback address cannot be the endpoint of the Service `kubernetes`.
        "--endpoint-reconciler-type=none",
    ]
    log = cluster.directory / "kube-apiserver.log"
    return Process(command, log=log, is_ready=lambda: _is_ready(cluster), timeout_s=120)


def _controller_manager(cluster: ControlPlane, port: int) -> Process:
    kubeconfig = cluster.access.kubeconfig(cluster.server, cluster.ca_file, user=CONTROLLER_MANAGER)
    command = [
        str(cluster.bin / "kube-controller-manager"),
        f"--kubeconfig={kubeconfig}",
        f"--service-account-private-key-file={cluster.access.service_account_key}",
        f"--root-ca-file={cluster.ca_file}",
        "--leader-elect=false",
        # Each controller has a role of its own; the account of all of them has hardly any.
        "--use-service-account-credentials",
        # No kubelet says that it lives.
        "--node-monitor-grace-period=24h",
        *_served(cluster, "controller-manager", port),
    ]
    return _controller(cluster, command, port)


def _scheduler(cluster: ControlPlane, port: int) -> Process:
    kubeconfig = cluster.access.kubeconfig(cluster.server, cluster.ca_file, user=SCHEDULER)
    command = [
        str(cluster.bin / "kube-scheduler"),
        f"--kubeconfig={kubeconfig}",
        "--leader-elect=false",
        *_served(cluster, "scheduler", port),
    ]
    return _controller(cluster, command, port)


def _served(cluster: ControlPlane, name: str, port: int) -> list[str]:
    return [f"--bind-address={_LOOPBACK}", f"--secure-port={port}", f"--cert-dir={cluster.directory / name}"]


def _controller(cluster: ControlPlane, command: list[str], port: int) -> Process:
    log = cluster.directory / f"{Path(command[0]).name}.log"
    return Process(command, log=log, is_ready=_answers(f"https://{_LOOPBACK}:{port}/healthz"))


def _answers(url: str) -> Callable[[], bool]:
    """Asks whether a URL on this machine answers with 200; whose certificate it has is of no interest."""
    context = _unverified()

    def answers() -> bool:
        try:
            return httpx.get(url, verify=context, trust_env=False, timeout=2).is_success
        except httpx.TransportError:
            return False

    return answers


def _unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _is_ready(cluster: ControlPlane) -> bool:
    if not cluster.ca_file.exists():
        return False
    try:
        with KubernetesApi(cluster.kubeconfig) as api:
            # The namespace is the last that the API server makes for itself at its first start.
            return api.is_ready() and api.find("v1", "Namespace", "default") is not None
    except (httpx.TransportError, OSError):
        return False


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server((_LOOPBACK, 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
