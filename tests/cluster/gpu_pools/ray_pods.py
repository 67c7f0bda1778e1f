"""Processes on this machine in place of the containers of a RayCluster's pods.

kwok reports that a pod runs, but starts nothing. Here the head, its autoscaler and the workers are Ray's own programs.
Each has the name of its pod, and the autoscaler has the token of the service account that KubeRay created for it.
"""

import os
import secrets
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

from ray_job.contract.cluster import GPU_RESOURCE
from service.local.ray_head import free_ports
from tests.cluster.api import JsonObject, KubernetesApi
from tests.cluster.control_plane import ControlPlane
from tests.cluster.ports import LOOPBACK
from tests.cluster.processes import Process

_BIN: Final = Path(sys.executable).parent
_ROOT: Final = Path(__file__).parents[3]
_STARTED: Final = b"Ray runtime started."
_OBJECT_STORE_BYTES: Final = 100_000_000


class RayPods:
    """Processes of one RayCluster. Use it as a context manager: the head and its autoscaler run inside.

    Args:
        cluster: control plane of the RayCluster.
        api: API server with administrator rights.
        head: pod of the head, with an address.
    """

    def __init__(self, cluster: ControlPlane, api: KubernetesApi, head: JsonObject) -> None:
        self._cluster = cluster
        self._api = api
        self._pod = head
        self._name = head["metadata"]["labels"]["ray.io/cluster"]
        self._namespace = head["metadata"]["namespace"]
        self._directory = Path()
        (port,) = free_ports(1)
        self._address = f"{LOOPBACK}:{port}"
        self._ray_token = secrets.token_hex(32)
        self._processes = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as processes:
            # Not below the test's directory: a socket's path has at most 107 characters.
            self._directory = Path(processes.enter_context(TemporaryDirectory(prefix="ray-")))
            processes.enter_context(self._head())
            processes.enter_context(self._autoscaler())
            self._processes = processes.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processes.close()

    def demand(self, *, engines: int, gpus: int) -> Process:
        """Run a driver that requests engines with this many GPUs each."""
        command = [sys.executable, "-m", f"{__package__}.ray_demand", self._address, str(engines), str(gpus)]
        return self._process("demand", command, {})

    def join(self, pod: JsonObject) -> None:
        """Start the Ray node of a scheduled worker pod, and wait until it has joined the cluster."""
        command = [str(_BIN / "ray"), "start", f"--address={self._address}", *_parameters(pod)]
        self._processes.enter_context(self._ray_node(pod, command, {}))

    def _head(self) -> Process:
        host, _, port = self._address.partition(":")
        command = [str(_BIN / "ray"), "start", "--head", f"--node-ip-address={host}", f"--port={port}"]
        command += ["--no-monitor", "--include-dashboard=false", f"--temp-dir={self._directory / 'ray'}"]
        return self._ray_node(self._pod, [*command, *_parameters(self._pod)], {"RAY_enable_autoscaler_v2": "1"})

    def _ray_node(self, pod: JsonObject, command: list[str], environment: dict[str, str]) -> Process:
        name, labels = pod["metadata"]["name"], pod["metadata"]["labels"]
        # KubeRay passes these two to a Ray node, so that the autoscaler can match it with its pod.
        identity = {"RAY_CLOUD_INSTANCE_ID": name, "RAY_NODE_TYPE_NAME": labels["ray.io/group"]}
        log = self._directory / f"{name}.log"
        return self._process(name, command, {**identity, **environment}, is_ready=lambda: _STARTED in log.read_bytes())

    def _autoscaler(self) -> Process:
        token = self._directory / "token"
        token.touch(mode=0o600)
        token.write_text(self._api.token(self._pod["spec"]["serviceAccountName"], self._namespace))
        server = urlsplit(self._cluster.server)
        environment = {
            "KUBERNETES_SERVICE_HOST": str(server.hostname),
            "KUBERNETES_SERVICE_PORT_HTTPS": str(server.port),
            "RAY_KUBERAY_CA_CERT_PATH": str(self._cluster.ca_file),
            "KUBERAY_CRD_VER": "v1",
            "RAY_HEAD_POD_NAME": self._pod["metadata"]["name"],
            # The default is five seconds.
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        }
        arguments = [self._name, self._namespace, self._address, str(token)]
        return self._process(
            "autoscaler", [sys.executable, "-m", f"{__package__}.ray_autoscaler", *arguments], environment
        )

    def _process(
        self, name: str, command: list[str], environment: dict[str, str], *, is_ready: Callable[[], bool] = lambda: True
    ) -> Process:
        own = {
            "PATH": f"{_BIN}:{os.defpath}",
            "HOME": str(self._directory),
            "PYTHONPATH": str(_ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._ray_token,
            # This process stops nodes itself; nothing runs on them.
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        }
        log = self._directory / f"{name}.log"
        return Process(command, log=log, environment={**own, **environment}, is_ready=is_ready)


def _parameters(pod: JsonObject) -> list[str]:
    """Return ``ray start`` of a pod without its sizes: this machine has neither its CPUs nor its GPUs."""
    gpus = int(pod["spec"]["containers"][0]["resources"]["limits"].get(GPU_RESOURCE, 0))
    sizes = ["--num-cpus=0", f"--num-gpus={gpus}", f"--object-store-memory={_OBJECT_STORE_BYTES}"]
    # Ray's fixed port range would be shared by all nodes on this machine.
    return ["--block", "--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0", *sizes]
