"""The stack ``dev`` with all pods running on a real cluster, deployed by Pulumi from the project's images."""

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

from infra.data.object_store import COMPONENT, PORT, REGION
from infra.stack_file.reading import read_stack_file
from tests.cluster.api import KubernetesApi
from tests.cluster.control_plane import ControlPlane
from tests.cluster.deployed import DEV, JOBS, MODEL, SERVICE
from tests.cluster.dev_stack import SECRETS, Deployment, dev_stack
from tests.cluster.images.image import Image
from tests.cluster.kuberay import install_crds
from tests.cluster.kuberay_operator import deploy_operator
from tests.cluster.node.real_cluster import RealCluster
from tests.cluster.nodes import add_node

# A second node of the pool that takes no pods: the stack's quota covers both, and two jobs fit on the first.
DRAINED: Final = "node-3"
_POOLS: Final = {
    "system": {"nodes": ["node-1"]},
    "cpu": {"nodes": ["node-2", DRAINED], "cpus": 1, "memory_gib": 10},
}
_VOLUMES: Final = {name: {"kind": "bundled", "volume": {"size_gib": 2}} for name in ("database", "object_store")}
_MODEL: Final = {
    # In float32 the answers do not depend on what else is in the batch.
    "engine_args": {"dtype": "float32", "max_model_len": 2048, "enforce_eager": True, "max_num_seqs": 128},
    # Small parts, so that a fault during the batch finds some lines committed and others not.
    "batch_size": 16,
    # The tests expect one job for each batch, which ends with it.
    "sharing": "batch",
    "keep_warm_s": 0,
}
# The same weights, with jobs as users have them, but for a shorter time.
WARM: Final = "warm"
KEEP_WARM_S: Final = 15
_WARM_MODEL: Final = {"id": WARM, "sharing": "project", "keep_warm_s": KEEP_WARM_S}


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStack:
    """A running stack.

    Attributes:
        cluster: cluster of the stack.
        deployment: Pulumi's view of the stack.
        base_url: URL of the API, at its Service's cluster IP.
        api_key: first API key.
        ray_image: image of the stack's jobs.
    """

    cluster: RealCluster
    deployment: Deployment
    base_url: str
    api_key: str
    ray_image: str

    def client(self) -> OpenAI:
        """Return OpenAI's client with retries, because pods come and go."""
        return OpenAI(base_url=self.base_url, api_key=self.api_key, max_retries=6, timeout=60)


@contextmanager
def running_stack(
    cluster: RealCluster, images: Mapping[str, Image], programs: Path, directory: Path, model: Path
) -> Iterator[WholeStack]:
    """Deploy the stack, and destroy it afterwards.

    Args:
        cluster: a cluster with real nodes.
        images: images of the stack by name.
        programs: the directory with ``bin/pulumi`` and ``bin/kubectl``.
        directory: an empty directory for Pulumi's workspace and state.
        model: directory of the demo model.
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
                deployment.up()
                upload_weights(api, model)
                yield WholeStack(
                    cluster=cluster,
                    deployment=deployment,
                    base_url=f"http://{cluster_ip(api, 'api')}/v1",
                    api_key=first_key(deployment, cluster.control_plane),
                    ray_image=images["ray-cpu"].reference,
                )
            finally:
                deployment.destroy()
                api.delete("v1", "Node", DRAINED)


def changed_sections(cluster: ControlPlane, images: Mapping[str, Image]) -> dict[str, Any]:
    """Return the sections of the stack file that depend on this machine."""
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
        "models": [model | _MODEL | changes for model in file["models"] for changes in ({}, _WARM_MODEL)],
        "keep_data": False,
        **_VOLUMES,
    }


def add_drained_node(api: KubernetesApi, name: str) -> None:
    """Create a node that exists by name only: nothing is ever scheduled to it."""
    add_node(api, name, {"cpu": "1", "memory": "10Gi"})
    node: dict[str, Any] = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    api.patch({**node, "spec": {"unschedulable": True}}, field_manager="kubectl-cordon")


def upload_weights(api: KubernetesApi, model: Path) -> None:
    """Upload the demo model below ``models/`` of the stack's prefix, as docs/how-to/add-a-model.md describes.

    Args:
        api: API server of the cluster.
        model: directory of the model.
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
    """Return the cluster IP of a Service of the stack, which also works on the nodes."""
    found = api.find("v1", "Service", service, SERVICE)
    assert found is not None, f"the Service {service} does not exist"
    return str(found["spec"]["clusterIP"])


def first_key(deployment: Deployment, cluster: ControlPlane) -> str:
    """Run the command in the stack's output ``first_key``, kubectl in a pod, and return the API key."""
    command = shlex.split(deployment.stack.outputs()["first_key"].value)
    environment = {"PATH": f"{cluster.bin}:{os.environ['PATH']}", "KUBECONFIG": str(cluster.kubeconfig)}
    environment |= {"HOME": str(cluster.directory)}  # kubectl caches discovery data there
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"
    return done.stdout.strip()


def namespaces_left(api: KubernetesApi) -> list[str]:
    """Return the namespaces of the stack that still exist."""
    return [name for name in (SERVICE, JOBS) if api.find("v1", "Namespace", name) is not None]
