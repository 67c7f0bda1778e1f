"""The environment of the children."""

from collections.abc import Mapping
from pathlib import Path

import psutil

from service.local.layout import Layout

LOCAL_ID = "CLOISTER_LOCAL_ID"
CHILD = "CLOISTER_LOCAL_CHILD"

# Variables of the caller that would change what a child does behind our back.
DROPPED = (
    "RAY_ADDRESS",
    "RAY_AUTH_TOKEN",
    "RAY_TMPDIR",
    "PYTHONDONTWRITEBYTECODE",
    "PGHOST",
    "PGPORT",
    "PGUSER",
    "PGPASSWORD",
)

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Ray and vLLM rename their processes; without this the new name overwrites the environment that
    # the kernel shows, and with it the mark by which the guard finds them.
    "SPT_NOENV": "1",
    "PYTHONUNBUFFERED": "1",
}


def cpu_engine(cores: int) -> dict[str, str]:
    """What an engine on the CPU needs; a value of the caller's own goes before it.

    Ray gives a worker as many threads as it reserves CPUs, which for the engine is one, and leaves the others idle: on
    two cores vLLM's own LLM.chat answered 43 rows per second on one of them and 69 on both.
    """
    return {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": str(cores)}


def child_environment(
    layout: Layout, child: str, inherited: Mapping[str, str], *, offline: bool, gpu: bool
) -> dict[str, str]:
    """What every child gets, besides its own settings.

    Args:
        layout: the paths of the data directory.
        child: the child's name; with the layout's id it marks the child and all its descendants.
        inherited: the environment of the supervisor.
        offline: forbid Hugging Face downloads, because the model lies on this machine.
        gpu: this machine has a GPU.
    """
    environment = {name: value for name, value in inherited.items() if name not in DROPPED}
    environment |= QUIET
    if not gpu:
        environment = {**cpu_engine(psutil.cpu_count() or 1), **environment}
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    return environment | {
        LOCAL_ID: layout.local_id,
        CHILD: child,
        "TMPDIR": str(layout.temporary_dir),
        # Some of Ray's ports listen on every interface: without a token the whole network could run code here.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(layout.ray_token),
    }


def service_environment(layout: Layout, *, models_file: Path, port: int, ray_port: int) -> dict[str, str]:
    """The settings of the service and the reconciler."""
    return {
        "CLOISTER_DATABASE_URL": layout.database_url("cloister"),
        "CLOISTER_JOB_DATABASE_URL": layout.database_url("cloister_job"),
        "CLOISTER_OBJECT_STORE": layout.objects.as_uri(),
        "CLOISTER_MODELS": str(models_file),
        "CLOISTER_HOST": "127.0.0.1",
        "CLOISTER_PORT": str(port),
        "CLOISTER_RAY_ADDRESS": f"http://127.0.0.1:{ray_port}",
    }
