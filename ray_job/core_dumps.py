"""Core dumps: the memory of drivers, workers and engines holds prompts."""

import resource
from typing import Final

WORKER_SETUP: Final = "ray_job.core_dumps.disable_core_dumps"
"""The ``worker_process_setup_hook`` of Ray's workers."""


def disable_core_dumps() -> None:
    """Let this process and those that it starts write no core files. A kernel that pipes dumps ignores the limit."""
    _, most_bytes = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most_bytes))
