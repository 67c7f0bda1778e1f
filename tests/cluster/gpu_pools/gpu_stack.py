"""The example stack with GPU nodes on demand, on a cluster with real autoscalers and kwok's nodes."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from infra.stack_file.cluster_sections import NodePoolsSection
from ray_job.contract.accelerators import ACCELERATORS
from ray_job.contract.cluster import POOL_LABEL
from ray_job.contract.job_spec import JobSpec
from ray_job.contract.rayjobs import rayjob_name
from service.adapters.kuberay_launcher import KubeRayLauncher
from service.adapters.rayjobs_api import RayJobsApi, open_client
from service.errors import LauncherError, LaunchRefusedError
from tests.cluster.api import JsonObject, KubernetesApi
from tests.cluster.control_plane import ControlPlane, kuberay_operator
from tests.cluster.deployed import TOKEN, deployed_stack
from tests.cluster.gpu_pools import karpenter
from tests.cluster.gpu_pools.kwok import kwok, nodes_of

EXAMPLE: Final = Path(__file__).parents[3] / "docs" / "stacks" / "Pulumi.gpu-nodes-on-demand.yaml"
JOBS: Final = "cloister-acme-cloud-jobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStack:
    """The running stack.

    Attributes:
        cluster: control plane of the stack.
        api: API server with administrator rights.
        launcher: launcher with the service account of the stack.
    """

    cluster: ControlPlane
    api: KubernetesApi
    launcher: KubeRayLauncher

    def launch(self, job: JobSpec) -> JsonObject:
        """Launch a job, and return its head's pod when the head and the first worker run."""
        eventually(lambda: self._launched(job))
        eventually(lambda: [pod["status"]["phase"] for pod in self.pods(job)] == ["Running"] * 2)
        (head,) = self.pods(job, "headgroup")
        return head

    def _launched(self, job: JobSpec) -> bool:
        """Retry while the API server is unavailable, as the reconciler does."""
        try:
            self.launcher.launch(job, TOKEN)
        except LaunchRefusedError:
            raise
        except LauncherError:
            return False
        return True

    def pods(self, job: JobSpec, group: str = "") -> list[JsonObject]:
        """Return the pods of a job, or of one of its groups: ``headgroup``, ``cpu``, ``v100`` or ``a10g``."""
        name = rayjob_name(job.job_id)
        found = [pod for pod in self.api.list("v1", "Pod", JOBS) if pod["metadata"]["name"].startswith(name)]
        return [pod for pod in found if group in ("", pod["metadata"]["labels"]["ray.io/group"])]

    def nodes(self, pool: str) -> dict[str, JsonObject]:
        """Return the nodes of a pool by name."""
        found = {node["metadata"]["name"]: node for node in self.api.list("v1", "Node")}
        return {
            name: node for name, node in found.items() if node["metadata"].get("labels", {}).get(POOL_LABEL) == pool
        }

    def account(self, head: JsonObject) -> KubernetesApi:
        """Return the Kubernetes API with the service account of the autoscaler beside a head."""
        token = self.api.token(head["spec"]["serviceAccountName"], JOBS)
        server, ca_file = self.cluster.server, self.cluster.ca_file
        return KubernetesApi(self.cluster.access.kubeconfig(server, ca_file, user="autoscaler", token=token))

    def scale(self, head: JsonObject, group: str, replicas: int) -> None:
        """Set the number of workers, as Ray's autoscaler does when engines request them."""
        with self.account(head) as own:
            name = head["metadata"]["labels"]["ray.io/cluster"]
            found = own.find("ray.io/v1", "RayCluster", name, JOBS)
            assert found is not None
            groups = copy.deepcopy(found["spec"]["workerGroupSpecs"])
            for each in groups:
                each["replicas"] = replicas if each["groupName"] == group else each["replicas"]
            place = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": name, "namespace": JOBS}}
            own.patch({**place, "spec": {"workerGroupSpecs": groups}}, field_manager="autoscaler")


def eventually(ask: Callable[[], Any], *, within_s: float = 120) -> Any:
    """Wait until the result is true, and return it."""
    end = time.monotonic() + within_s
    while not (found := ask()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found


@contextmanager
def gpu_stack(cluster: ControlPlane, api: KubernetesApi, directory: Path) -> Iterator[GpuStack]:
    """Run the stack with its nodes and Karpenter, and remove everything afterwards."""
    file = directory / "Pulumi.gpus.yaml"
    values = yaml.safe_load(EXAMPLE.read_text())
    # Minutes in the example.
    values["config"]["cloister:jobs"]["idle_timeout_s"] = 5
    file.write_text(yaml.safe_dump(values))
    pools = NodePoolsSection.model_validate(values["config"]["cloister:node_pools"]).pools(ACCELERATORS).values()
    on_demand = [pool for pool in pools if pool.max_nodes]
    karpenter.install_crds(api)
    with ExitStack() as stack:
        stack.enter_context(kuberay_operator(cluster))
        stack.enter_context(kwok(cluster))
        stack.enter_context(nodes_of(api, pools))
        stack.enter_context(karpenter.karpenter(cluster, on_demand))
        stack.enter_context(karpenter.node_pools(api, on_demand))
        deployed = stack.enter_context(deployed_stack(cluster, api, file=file))
        rayjobs = RayJobsApi(open_client(deployed.reconciler), JOBS)
        launcher = stack.enter_context(KubeRayLauncher(rayjobs, deployed.templates))
        yield GpuStack(cluster=cluster, api=api, launcher=launcher)
