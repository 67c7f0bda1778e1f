"""Ray's autoscaler as KubeRay runs it beside a head, outside of a pod.

    python -m tests.cluster.gpu_pools.ray_autoscaler CLUSTER NAMESPACE GCS_ADDRESS TOKEN_FILE

All other settings of a pod are in the environment. The place of its token is not configurable there.
"""

import sys

from ray.autoscaler._private.kuberay import node_provider
from ray.autoscaler._private.kuberay.run_autoscaler import run_kuberay_autoscaler

if __name__ == "__main__":
    cluster, namespace, gcs_address, token_file = sys.argv[1:]
    node_provider.IN_CLUSTER_TOKEN_PATH = token_file
    run_kuberay_autoscaler(cluster, namespace, gcs_address)
