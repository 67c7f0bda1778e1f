"""Custom resource definitions of CloudNativePG and its Barman Cloud plugin, in the versions of their ``go.mod``."""

from pathlib import Path
from typing import Final

import yaml

from tests.cluster.api import KubernetesApi
from tests.cluster.go_modules import module_directory

_GO: Final = Path(__file__).parent / "go_cloudnative_pg"
_MODULES: Final = ("github.com/cloudnative-pg/cloudnative-pg", "github.com/cloudnative-pg/plugin-barman-cloud")


def install_crds(api: KubernetesApi) -> None:
    """Create the custom resource definitions, and return when the server serves those that a stack uses."""
    for module in _MODULES:
        for path in sorted((module_directory(_GO, module) / "config/crd/bases").glob("*.yaml")):
            # CSafeLoader is as safe as safe_load and ten times as fast.
            api.create(yaml.load(path.read_text(), Loader=yaml.CSafeLoader))
    for kind in ("Cluster", "ImageCatalog", "ScheduledBackup"):
        api.wait_until_known("postgresql.cnpg.io/v1", kind)
    api.wait_until_known("barmancloud.cnpg.io/v1", "ObjectStore")
