"""Ray's autoscaler as it runs beside a head of KubeRay, outside of a pod.

    python -m tests.cluster.gpu_pools.ray_autoscaler CLUSTER NAMESPACE GCS_ADDRESS TOKEN_FILE

Everything else that a pod would tell it is in the environment. Where its token is cannot be told to it otherwise.
"""

import sys

from ray.autoscaler._private.kuberay import node_provider
from ray.autoscaler._private.kuberay.run_autoscaler import run_kuberay_autoscaler

if __name__ == "__main__":
    cluster, namespace, gcs_address, token_file = sys.argv[1:]
    node_provider.IN_CLUSTER_TOKEN_PATH = token_file
    run_kuberay_autoscaler(cluster, namespace, gcs_address)
