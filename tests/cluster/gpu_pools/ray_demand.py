"""Request the GPUs of engines from a Ray cluster, as a job's actors do.

    python -m tests.cluster.gpu_pools.ray_demand GCS_ADDRESS ENGINES GPUS_PER_ENGINE

The process holds them until a signal ends it.
"""

import signal
import sys

import ray
from ray.util.placement_group import placement_group

if __name__ == "__main__":
    address, engines, gpus = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    ray.init(address=address, log_to_driver=False)
    groups = [placement_group([{"GPU": gpus}]) for _ in range(engines)]
    signal.pause()
