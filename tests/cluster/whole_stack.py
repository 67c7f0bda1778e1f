"""The stack ``dev`` with everything running: on a real cluster, by Pulumi, from images, with weights and an API key.

What it changes of ``Pulumi.dev.yaml`` is what a machine does: the kubeconfig, the images, where the API server is,
how large nodes and volumes are, and how the demo model answers the same every time.
"""

import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from openai import OpenAI

from infra.object_store import COMPONENT, PORT, REGION
from infra.stack_file import read_stack_file
from tests.cluster.api import KubernetesApi
from tests.cluster.control_plane import ControlPlane
from tests.cluster.deployed import DEV, JOBS, MODEL, SERVICE
from tests.cluster.dev_stack import SECRETS, Deployment, dev_stack
from tests.cluster.images.image import Image
from tests.cluster.kuberay import install_crds
from tests.cluster.kuberay_operator import deploy_operator
from tests.cluster.node.real_cluster import RealCluster
from tests.cluster.nodes import add_node

# A second node of the pool that takes no pods: the stack's quota is for both, and two jobs fit on the first.
DRAINED: Final = "node-3"
_POOLS: Final = {
    "system": {"nodes": ["node-1"]},
    "cpu": {"nodes": ["node-2", DRAINED], "cpus": 1, "memory_gib": 10},
}
_VOLUMES: Final = {name: {"kind": "bundled", "volume": {"size_gib": 2}} for name in ("database", "object_store")}
_MODEL: Final = {
    # In float32 the answers do not depend on what else is in the batch.
    "engine_args": {"dtype": "float32", "max_model_len": 2048, "enforce_eager": True},
    # Small parts, so that a fault in the middle finds some lines committed and others not.
    "batch_size": 16,
    "max_concurrent_batches": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStack:
    """A running stack.

    Attributes:
        cluster: where it runs.
        deployment: the stack as Pulumi has it.
        base_url: of the API, at its Service's cluster IP.
        api_key: the first one.
        ray_image: what its jobs run.
    """

    cluster: RealCluster
    deployment: Deployment
    base_url: str
    api_key: str
    ray_image: str

    def client(self) -> OpenAI:
        """OpenAI's own client; one that retries, as pods come and go."""
        return OpenAI(base_url=self.base_url, api_key=self.api_key, max_retries=6, timeout=60)


@contextmanager
def running_stack(
    cluster: RealCluster, images: Mapping[str, Image], programs: Path, directory: Path, model: Path
) -> Iterator[WholeStack]:
    """Deploys the stack, and destroys it in the end.

    Args:
        cluster: a real one.
        images: of the stack.
        programs: the directory with ``bin/pulumi`` and ``bin/kubectl``.
        directory: an empty one for Pulumi's workspace and state.
        model: the demo model's directory.
    """
    with KubernetesApi(cluster.control_plane.kubeconfig) as api:
        install_crds(api)
        deploy_operator(api, images["ray-operator"].reference)
        add_drained_node(api, DRAINED)
        with dev_stack(
            cluster.control_plane,
            programs,
            directory,
            **changed_sections(cluster.control_plane, images),
        ) as deployment:
            try:
                deployment.stack.up()
                upload_weights(api, model)
                yield WholeStack(
                    cluster=cluster,
                    deployment=deployment,
                    base_url=f"http://{cluster_ip(api, 'api')}/v1",
                    api_key=first_key(deployment, cluster.control_plane),
                    ray_image=images["ray-cpu"].reference,
                )
            finally:
                deployment.stack.destroy()
                api.delete("v1", "Node", DRAINED)


def changed_sections(cluster: ControlPlane, images: Mapping[str, Image]) -> dict[str, Any]:
    """The sections of the stack file that this machine decides."""
    server = urlsplit(cluster.server)
    file = read_stack_file(DEV).values
    return {
        "images": {
            "service": images["service"].reference,
            "ray_cpu": {"image": images["ray-cpu"].reference},
            "postgres": images["postgres"].reference,
            "versitygw": images["versitygw"].reference,
        },
        "network": {"kubernetes_api": {"networks": [f"{server.hostname}/32"], "port": server.port}},
        "node_pools": _POOLS,
        "models": [model | _MODEL for model in file["models"]],
        "keep_data": False,
        **_VOLUMES,
    }


def add_drained_node(api: KubernetesApi, name: str) -> None:
    """A node that is there by name only: nothing is ever scheduled to it."""
    add_node(api, name, {"cpu": "1", "memory": "10Gi"})
    node: dict[str, Any] = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    api.patch({**node, "spec": {"unschedulable": True}}, field_manager="kubectl-cordon")


def upload_weights(api: KubernetesApi, model: Path) -> None:
    """Puts the demo model where docs/operate.md says: below ``models/`` of the stack's prefix.

    Args:
        api: the cluster.
        model: the model's directory.
    """
    store = boto3.client(
        "s3",
        endpoint_url=f"http://{cluster_ip(api, COMPONENT)}:{PORT}",
        region_name=REGION,
        aws_access_key_id=SERVICE,
        aws_secret_access_key=SECRETS["object_store_secret_access_key"],
        config=Config(proxies={}),
    )
    for path in sorted(model.iterdir()):
        store.upload_file(str(path), SERVICE, f"acme/dev/models/{MODEL}/{path.name}")


def cluster_ip(api: KubernetesApi, service: str) -> str:
    """Where a Service of the stack answers, also on the nodes themselves."""
    found = api.find("v1", "Service", service, SERVICE)
    assert found is not None, f"there is no Service {service}"
    return str(found["spec"]["clusterIP"])


def first_key(deployment: Deployment, cluster: ControlPlane) -> str:
    """The API key that the stack's output ``first_key`` makes, a command of kubectl in a pod."""
    command = shlex.split(deployment.stack.outputs()["first_key"].value)
    environment = {"PATH": f"{cluster.bin}:{os.environ['PATH']}", "KUBECONFIG": str(cluster.kubeconfig)}
    environment |= {"HOME": str(cluster.directory)}  # where kubectl keeps what it has learned
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"
    return done.stdout.strip()


def namespaces_left(api: KubernetesApi) -> list[str]:
    """The stack's namespaces that are still there."""
    return [name for name in (SERVICE, JOBS) if api.find("v1", "Namespace", name) is not None]
