"""Metrics that every process of the service has."""

from importlib.metadata import version
from typing import Literal

from prometheus_client import CollectorRegistry, Gauge

from service.workspace import Workspace


def register_process(registry: CollectorRegistry, component: Literal["api", "reconciler", "coordinator"]) -> None:
    """Register the component and its version."""
    info = Gauge("cloister_build_info", "1 for each process.", ("component", "version"), registry=registry)
    info.labels(component, version("cloister")).set(1)


def register_workspace(registry: CollectorRegistry, workspace: Workspace) -> None:
    """Register the use of a workspace, and its size if that is limited."""
    claimed = Gauge("cloister_workspace_claimed_bytes", "Disk that uploads and results occupy.", registry=registry)
    claimed.set_function(lambda: workspace.claimed_bytes)
    if workspace.size_bytes is not None:
        size = Gauge("cloister_workspace_size_bytes", "Disk for uploads and results.", registry=registry)
        size.set(workspace.size_bytes)
