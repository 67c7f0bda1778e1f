"""KubeRay's custom resource definitions and operator, in the version that ``go/go.mod`` requires."""

from pathlib import Path
from typing import Final

import yaml

from tests.cluster.api import KubernetesApi
from tests.cluster.go_modules import module_directory

_GO: Final = Path(__file__).parent / "go"
_MODULE: Final = "github.com/ray-project/kuberay/ray-operator"
# infra.shared_platform.kuberay passes the same two to the chart.
GATES: Final = "RayClusterStatusConditions=true,RayJobDeletionPolicy=true"


def install_crds(api: KubernetesApi) -> None:
    """Create the custom resource definitions, and return when the server serves them."""
    for path in module_files("crd/bases"):
        # CSafeLoader is as safe as safe_load and ten times as fast.
        body = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
        api.create(body)
    for kind in ("RayCluster", "RayJob", "RayService"):
        api.wait_until_known("ray.io/v1", kind)


def module_files(folder: str) -> list[Path]:
    """Return the manifests of a folder of the operator's ``config``."""
    return sorted((module_directory(_GO, _MODULE) / "config" / folder).glob("*.yaml"))


def version() -> str:
    """Return KubeRay's version, e.g. ``1.6.1``."""
    return module_directory(_GO, _MODULE).name.rpartition("@v")[2]


def operator_command(programs: Path, kubeconfig: Path, *, metrics_port: int, probe_port: int) -> list[str]:
    """Return the command line of the operator outside of a cluster."""
    return [
        str(programs / "ray-operator"),
        f"--kubeconfig={kubeconfig}",
        f"--metrics-addr=127.0.0.1:{metrics_port}",
        f"--health-probe-bind-address=127.0.0.1:{probe_port}",
        "--enable-leader-election=false",
        f"--feature-gates={GATES}",
    ]
