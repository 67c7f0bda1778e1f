"""The default storage class: directories of one node, made beforehand; each serves one claim and is then kept."""

from typing import Final

from tests.cluster.api import JsonObject
from tests.cluster.node.layout import VOLUMES, NodeLayout

_CLASS: Final = "local"
_NUMBER: Final = 12
# No claim is too big for it; nothing limits what is written.
_SIZE: Final = "500Gi"


def make_volumes(node: NodeLayout) -> list[JsonObject]:
    """Makes the directories.

    Returns:
        what the cluster has to be told, in order.
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
            # A volume is on a node: the pod's place is chosen together with it.
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
