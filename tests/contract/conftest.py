"""The KubeRay launcher on a stand-in for Kubernetes without an operator: tests set the status of RayJobs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from service.adapters.kuberay_launcher import KubeRayLauncher
from service.adapters.rayjobs_api import RayJobsApi, open_client
from tests.contract.kubernetes_stand_in import ApiServer, kubeconfig, kubernetes_stand_in
from tests.contract.rayjobs import TEMPLATES

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
