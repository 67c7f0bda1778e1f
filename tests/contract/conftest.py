"""All object stores, and the KubeRay launcher on a stand-in for Kubernetes without an operator."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from ray_job.contract.job_spec import ObjectStoreLocation
from service.adapters.kuberay_launcher import KubeRayLauncher
from service.adapters.memory_object_store import MemoryObjectStore
from service.adapters.open_object_store import open_object_store
from service.adapters.rayjobs_api import RayJobsApi, open_client
from service.ports import ObjectStore
from tests.contract.kubernetes_stand_in import ApiServer, kubeconfig, kubernetes_stand_in
from tests.contract.rayjobs import TEMPLATES
from tests.s3_server import CREDENTIALS

TOKEN = "a7d1"


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with kubernetes_stand_in(TOKEN) as opened:
        opened.cluster.is_operator_running = False
        yield opened


@pytest.fixture
def open_launcher(server: ApiServer, tmp_path: Path) -> Iterator[Callable[[], KubeRayLauncher]]:
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(server, TOKEN))
    with ExitStack() as stack:
        yield lambda: stack.enter_context(KubeRayLauncher(RayJobsApi(open_client(path), "jobs"), TEMPLATES))


@pytest.fixture
def launcher(open_launcher: Callable[[], KubeRayLauncher]) -> KubeRayLauncher:
    return open_launcher()


@pytest.fixture(scope="module")
def s3_location() -> Iterator[ObjectStoreLocation]:
    patch = pytest.MonkeyPatch()
    for name, value in CREDENTIALS.items():
        patch.setenv(name, value)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    location = ObjectStoreLocation(
        kind="s3", bucket="cloister", prefix="some/stack", endpoint_url=f"http://{host}:{port}", region="us-east-1"
    )
    client = boto3.client("s3", endpoint_url=location.endpoint_url, region_name=location.region)
    client.create_bucket(Bucket="cloister")
    client.close()
    yield location
    server.stop()
    patch.undo()


@pytest.fixture(params=["memory", "directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "memory":
        return MemoryObjectStore()
    if request.param == "directory":
        return open_object_store(ObjectStoreLocation(kind="directory", root=str(tmp_path / "objects")))
    opened = open_object_store(request.getfixturevalue("s3_location"))
    for key in list(opened.keys("")):
        opened.delete(key)
    return opened
