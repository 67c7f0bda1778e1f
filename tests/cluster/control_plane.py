"""A real Kubernetes control plane: etcd, API server, controller manager, scheduler.

It writes to one directory only and ends all its processes. On loopback there is no kubelet: pods are admitted and bound
to the nodes of ``nodes.py`` but never run. ``node/`` provides real nodes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from service.local.ray_head import free_ports
from tests.cluster import kuberay
from tests.cluster.access import CONTROLLER_MANAGER, OPERATOR, SCHEDULER, Access, make_access
from tests.cluster.api import KubernetesApi
from tests.cluster.ports import LOOPBACK, answers
from tests.cluster.processes import Process

SERVICE_NETWORK: Final = "10.96.0.0/16"
# A loopback address cannot be the endpoint of the Service `kubernetes`.
_WITHOUT_KUBELETS: Final = ("--authorization-mode=RBAC", "--endpoint-reconciler-type=none")
# Without kubelets, nodes send no heartbeats.
_NEVER: Final = "24h"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlane:
    """A running cluster.

    Attributes:
        bin: directory of the programs.
        directory: directory of all files that the control plane writes.
        server: URL of the API server.
        ca_file: CA of the API server's certificate.
        access: users and their credentials.
        kubeconfig: kubeconfig of the administrator.
        has_kubelets: pods run; otherwise they are only bound to nodes.
    """

    bin: Path
    directory: Path
    server: str
    ca_file: Path
    access: Access
    kubeconfig: Path
    has_kubelets: bool = False


@contextmanager
def control_plane(programs: Path, directory: Path) -> Iterator[ControlPlane]:
    """Run a new, empty cluster.

    Args:
        programs: the ``bin`` directory of ``build.py``.
        directory: an empty directory.
    """
    cluster, processes = control_plane_parts(programs, directory)
    with ExitStack() as stack:
        for each in processes:
            stack.enter_context(each)
        yield cluster


def control_plane_parts(
    programs: Path, directory: Path, *, address: str = LOOPBACK, nodes: Sequence[str] = ()
) -> tuple[ControlPlane, list[Process]]:
    """Return a new, empty cluster whose processes have not been started.

    Args:
        programs: the ``bin`` directory of ``build.py``.
        directory: an empty directory.
        address: address of the API server. Pods can reach that of a bridge.
        nodes: names of the nodes with a kubelet; such a cluster can outlive this process.

    Returns:
        The cluster, and its processes in the order in which to start them.
    """
    access = make_access(directory, nodes)
    etcd_port, etcd_peers, port, manager_port, scheduler_port = free_ports(5)
    server, ca_file = f"https://{address}:{port}", directory / "apiserver" / "apiserver.crt"
    cluster = ControlPlane(
        bin=programs,
        directory=directory,
        server=server,
        ca_file=ca_file,
        access=access,
        kubeconfig=access.kubeconfig(server, ca_file),
        has_kubelets=bool(nodes),
    )
    etcd_url = f"http://{LOOPBACK}:{etcd_port}"
    return cluster, [
        _etcd(cluster, etcd_url, f"http://{LOOPBACK}:{etcd_peers}"),
        _api_server(cluster, etcd_url, address, port),
        _controller_manager(cluster, manager_port),
        _scheduler(cluster, scheduler_port),
    ]


def kuberay_operator(cluster: ControlPlane, *, token: str = "", watched: Sequence[str] = ()) -> Process:
    """Return KubeRay's operator as a process outside of the cluster; the CRDs must exist.

    Args:
        cluster: the cluster.
        token: token of its account; empty for an administrator.
        watched: the namespaces that it watches; empty for all.
    """
    metrics, probes = free_ports(2)
    kubeconfig = cluster.access.kubeconfig(cluster.server, cluster.ca_file, user=OPERATOR, token=token)
    command = kuberay.operator_command(
        cluster.bin, kubeconfig, metrics_port=metrics, probe_port=probes, watched=watched
    )
    log = cluster.directory / "ray-operator.log"
    # Its client reads credentials from a kubeconfig only with this flag or this variable.
    environment = {"KUBECONFIG": str(kubeconfig), "HOME": str(cluster.directory)}
    return Process(command, log=log, environment=environment, is_ready=answers(f"http://{LOOPBACK}:{probes}/readyz"))


def _etcd(cluster: ControlPlane, url: str, peer_url: str) -> Process:
    command = [
        str(cluster.bin / "etcd"),
        f"--data-dir={cluster.directory / 'etcd'}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
        f"--initial-cluster=default={peer_url}",
        # The data is needed for one run only, so it does not have to survive a power failure.
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]
    return _part(cluster, command, answers(f"{url}/health"))


def _api_server(cluster: ControlPlane, etcd_url: str, address: str, port: int) -> Process:
    key = cluster.access.service_account_key
    command = [
        str(cluster.bin / "kube-apiserver"),
        f"--etcd-servers={etcd_url}",
        f"--bind-address={address}",
        f"--secure-port={port}",
        f"--cert-dir={cluster.ca_file.parent}",
        f"--token-auth-file={cluster.access.token_file}",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--allow-privileged",
        *(_for_kubelets(cluster.access) if cluster.has_kubelets else _WITHOUT_KUBELETS),
    ]
    return _part(cluster, command, lambda: _is_ready(cluster))


def _for_kubelets(access: Access) -> list[str]:
    return [
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--kubelet-client-certificate={access.kubelet_client_certificate}",
        f"--kubelet-client-key={access.kubelet_client_key}",
        # No DNS server knows the nodes' names.
        "--kubelet-preferred-address-types=InternalIP",
    ]


def _controller_manager(cluster: ControlPlane, port: int) -> Process:
    kubeconfig = cluster.access.kubeconfig(cluster.server, cluster.ca_file, user=CONTROLLER_MANAGER)
    command = [
        str(cluster.bin / "kube-controller-manager"),
        f"--kubeconfig={kubeconfig}",
        f"--service-account-private-key-file={cluster.access.service_account_key}",
        f"--root-ca-file={cluster.ca_file}",
        "--leader-elect=false",
        # Each controller uses its own role; the shared account has few rights.
        "--use-service-account-credentials",
        f"--node-monitor-grace-period={'30s' if cluster.has_kubelets else _NEVER}",
        *_served(cluster, "controller-manager", port),
    ]
    return _part(cluster, command, answers(f"https://{LOOPBACK}:{port}/healthz"))


def _scheduler(cluster: ControlPlane, port: int) -> Process:
    kubeconfig = cluster.access.kubeconfig(cluster.server, cluster.ca_file, user=SCHEDULER)
    command = [
        str(cluster.bin / "kube-scheduler"),
        f"--kubeconfig={kubeconfig}",
        "--leader-elect=false",
        *_served(cluster, "scheduler", port),
    ]
    return _part(cluster, command, answers(f"https://{LOOPBACK}:{port}/healthz"))


def _served(cluster: ControlPlane, name: str, port: int) -> list[str]:
    return [f"--bind-address={LOOPBACK}", f"--secure-port={port}", f"--cert-dir={cluster.directory / name}"]


def _part(cluster: ControlPlane, command: list[str], is_ready: Callable[[], bool]) -> Process:
    log = cluster.directory / f"{Path(command[0]).name}.log"
    return Process(command, log=log, is_ready=is_ready, timeout_s=120, detached=cluster.has_kubelets)


def _is_ready(cluster: ControlPlane) -> bool:
    if not cluster.ca_file.exists():
        return False
    try:
        with KubernetesApi(cluster.kubeconfig) as api:
            # The API server creates this namespace last at its first start.
            return api.is_ready() and api.find("v1", "Namespace", "default") is not None
    except (httpx.TransportError, OSError):
        return False
