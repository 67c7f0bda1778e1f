"""Definitions of Cilium's network policies and of the Gateway API, in the versions of ``go_definitions/go.mod``.

Nothing in the cluster acts on these objects: the API server checks them.
"""

from pathlib import Path
from typing import Final

import yaml

from tests.cluster.api import KubernetesApi
from tests.cluster.go_modules import module_directory

_GO: Final = Path(__file__).parent / "go_definitions"
_FILES: Final = (
    ("github.com/cilium/cilium", "pkg/k8s/apis/cilium.io/client/crds/v2/ciliumnetworkpolicies.yaml"),
    ("sigs.k8s.io/gateway-api", "config/crd/standard/gateway.networking.k8s.io_gateways.yaml"),
    ("sigs.k8s.io/gateway-api", "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml"),
)


def install_definitions(api: KubernetesApi) -> None:
    """Create the custom resource definitions, and return when the server serves them."""
    for module, path in _FILES:
        text = (module_directory(_GO, module) / path).read_text()
        api.create(yaml.load(text, Loader=yaml.CSafeLoader))
    api.wait_until_known("cilium.io/v2", "CiliumNetworkPolicy")
    for kind in ("Gateway", "HTTPRoute"):
        api.wait_until_known("gateway.networking.k8s.io/v1", kind)
