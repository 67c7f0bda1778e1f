"""KubeRay's custom resource definitions and operator, in the version that ``go/go.mod`` requires."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from tests.cluster.api import KubernetesApi
from tests.cluster.go_modules import module_directory

_GO: Final = Path(__file__).parent / "go"
_MODULE: Final = "github.com/ray-project/kuberay/ray-operator"
# infra.shared_platform.kuberay passes the same two to the chart.
GATES: Final = "RayClusterStatusConditions=true,RayJobDeletionPolicy=true"
_ACCOUNT: Final = "kuberay-operator"
_ACCOUNT_NAMESPACE: Final = "default"
_RBAC: Final = "rbac.authorization.k8s.io"


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


def operator_rules() -> list[dict[str, Any]]:
    """Return the operator's rights. In version 1.6.1 they are the same as in the Helm chart's roles.

    Source: https://github.com/ray-project/kuberay/blob/v1.6.1/helm-chart/kuberay-operator/templates/_helpers.tpl
    """
    (role_file,) = (path for path in module_files("rbac") if path.name == "role.yaml")
    (role,) = (body for body in yaml.safe_load_all(role_file.read_text()) if body and body["kind"] == "ClusterRole")
    rules: list[dict[str, Any]] = role["rules"]
    return rules


@contextmanager
def operator_account(api: KubernetesApi, namespaces: Sequence[str]) -> Iterator[str]:
    """Yield the token of an account with the operator's rights in the given namespaces, and nowhere else.

    The Helm chart creates the same roles with ``singleNamespaceInstall``, ``crNamespacedRbacEnable`` and
    ``watchNamespace``. They are deleted with their namespaces.

    Args:
        api: API server of the cluster.
        namespaces: the namespaces, which must exist.
    """
    account = {"name": _ACCOUNT, "namespace": _ACCOUNT_NAMESPACE}
    api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
    for namespace in namespaces:
        role = {"apiVersion": f"{_RBAC}/v1", "metadata": {"name": _ACCOUNT, "namespace": namespace}}
        reference = {"apiGroup": _RBAC, "kind": "Role", "name": _ACCOUNT}
        subject = {"kind": "ServiceAccount", **account}
        api.create({**role, "kind": "Role", "rules": operator_rules()})
        api.create({**role, "kind": "RoleBinding", "roleRef": reference, "subjects": [subject]})
    try:
        yield api.token(_ACCOUNT, _ACCOUNT_NAMESPACE)
    finally:
        api.delete("v1", "ServiceAccount", _ACCOUNT, _ACCOUNT_NAMESPACE)


def version() -> str:
    """Return KubeRay's version, e.g. ``1.6.1``."""
    return module_directory(_GO, _MODULE).name.rpartition("@v")[2]


def operator_command(
    programs: Path, kubeconfig: Path, *, metrics_port: int, probe_port: int, watched: Sequence[str] = ()
) -> list[str]:
    """Return the command line of the operator outside of a cluster.

    Args:
        programs: directory of the program.
        kubeconfig: kubeconfig of the operator.
        metrics_port: port of its metrics.
        probe_port: port of its probes.
        watched: the namespaces that it watches; empty for all.
    """
    return [
        str(programs / "ray-operator"),
        f"--kubeconfig={kubeconfig}",
        f"--metrics-addr=127.0.0.1:{metrics_port}",
        f"--health-probe-bind-address=127.0.0.1:{probe_port}",
        "--enable-leader-election=false",
        f"--feature-gates={GATES}",
        *([f"--watch-namespace={','.join(watched)}"] if watched else []),
    ]
