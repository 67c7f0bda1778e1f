"""Default storage class: directories on one node, created in advance; each serves one claim and is then kept."""

from typing import Final

from tests.cluster.api import JsonObject
from tests.cluster.node.layout import VOLUMES, NodeLayout

_CLASS: Final = "local"
_NUMBER: Final = 12
# Large enough for any claim; no limit is enforced.
_SIZE: Final = "500Gi"


def make_volumes(node: NodeLayout) -> list[JsonObject]:
    """Create the directories.

    Returns:
        The objects to create in the cluster, in order.
    """
    names = [f"volume-{number}" for number in range(1, _NUMBER + 1)]
    for name in names:
        (VOLUMES / name).mkdir(parents=True)
    return [
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": _CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
            "provisioner": "kubernetes.io/no-provisioner",
            # A volume is on a node, so the pod is scheduled first.
            "volumeBindingMode": "WaitForFirstConsumer",
        },
        *(_volume(node, name) for name in names),
    ]


def _volume(node: NodeLayout, name: str) -> JsonObject:
    hostname = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node.name]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": _SIZE},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": _CLASS,
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": str(VOLUMES / name)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [hostname]}]}},
        },
    }
