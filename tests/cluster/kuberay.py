"""KubeRay: its custom resource definitions and its operator, both of the version that ``go/go.mod`` names."""

from pathlib import Path
from typing import Final

import yaml

from tests.cluster.api import KubernetesApi
from tests.cluster.go_modules import module_directory

_GO: Final = Path(__file__).parent / "go"
_MODULE: Final = "github.com/ray-project/kuberay/ray-operator"
# infra.kuberay gives the chart the same two.
GATES: Final = "RayClusterStatusConditions=true,RayJobDeletionPolicy=true"


def install_crds(api: KubernetesApi) -> None:
    """Makes the custom resource definitions, and returns once the server takes objects of them."""
    for path in module_files("crd/bases"):
        # Ten times as fast as safe_load, and as safe.
        body = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
        api.create(body)
    for kind in ("RayCluster", "RayJob", "RayService"):
        api.wait_until_known("ray.io/v1", kind)


def module_files(folder: str) -> list[Path]:
    """The manifests of a folder of the operator's own ``config``."""
    return sorted((module_directory(_GO, _MODULE) / "config" / folder).glob("*.yaml"))


def version() -> str:
    """Of KubeRay, e.g. ``1.6.1``."""
    return module_directory(_GO, _MODULE).name.rpartition("@v")[2]


def operator_command(programs: Path, kubeconfig: Path, *, metrics_port: int, probe_port: int) -> list[str]:
    """The command line of the operator outside of a cluster."""
    return [
        str(programs / "ray-operator"),
        f"--kubeconfig={kubeconfig}",
        f"--metrics-addr=127.0.0.1:{metrics_port}",
        f"--health-probe-bind-address=127.0.0.1:{probe_port}",
        "--enable-leader-election=false",
        f"--feature-gates={GATES}",
    ]
