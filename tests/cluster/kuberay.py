"""KubeRay: its custom resource definitions and its operator, both of the version that ``go/go.mod`` names."""

import subprocess
import time
from pathlib import Path
from typing import Final

import yaml

from tests.cluster.api import KubernetesApi

_GO: Final = Path(__file__).parent / "go"
_MODULE: Final = "github.com/ray-project/kuberay/ray-operator"
# infra.kuberay gives the chart the same two.
_GATES: Final = "RayClusterStatusConditions=true,RayJobDeletionPolicy=true"


def install_crds(api: KubernetesApi) -> None:
    """Makes the custom resource definitions, and returns once the server takes objects of them."""
    for path in sorted((_module_directory() / "config" / "crd" / "bases").glob("*.yaml")):
        # Ten times as fast as safe_load, and as safe.
        body = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
        api.create(body)
    for kind in ("RayCluster", "RayJob", "RayService"):
        _wait_for(api, kind)


def operator_command(programs: Path, kubeconfig: Path, *, metrics_port: int, probe_port: int) -> list[str]:
    """The command line of the operator outside of a cluster."""
    return [
        str(programs / "ray-operator"),
        f"--kubeconfig={kubeconfig}",
        f"--metrics-addr=127.0.0.1:{metrics_port}",
        f"--health-probe-bind-address=127.0.0.1:{probe_port}",
        "--enable-leader-election=false",
        f"--feature-gates={_GATES}",
    ]


def _module_directory() -> Path:
    command = ["go", "list", "-m", "-f", "{{.Dir}}", _MODULE]
    done = subprocess.run(command, cwd=_GO, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


def _wait_for(api: KubernetesApi, kind: str) -> None:
    end = time.monotonic() + 30
    while not api.knows("ray.io/v1", kind):
        if time.monotonic() > end:
            raise TimeoutError(f"the API server does not serve {kind} 30 s after its definition was made")
        time.sleep(0.2)
