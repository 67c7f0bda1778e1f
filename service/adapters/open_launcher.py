"""Opens the launcher that the settings select."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from service.adapters.ray_jobs_launcher import RayJobsLauncher
from service.errors import SettingsError
from service.model_catalogue import Catalogue
from service.ports import Launcher
from service.settings import Settings


@contextlib.contextmanager
def open_launcher(settings: Settings, catalogue: Catalogue, environment: Mapping[str, str]) -> Iterator[Launcher]:
    """Open the launcher until the context ends. Ray or Kubernetes need not be available yet.

    Args:
        settings: the kind of launcher, and the address of Ray or Kubernetes.
        catalogue: the models of the catalogue file.
        environment: the environment of this process.

    Raises:
        SettingsError: a template or a token is missing or invalid, or Kubernetes is not configured.
    """
    if settings.launcher == "kuberay":
        try:
            from service.adapters.kuberay_launcher import KubeRayLauncher
            from service.adapters.rayjob_templates import load_run_time_templates, load_templates
            from service.adapters.rayjobs_api import RayJobsApi, open_client
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"CLOISTER_LAUNCHER: kuberay needs the package {error.name}; install cloister[cluster]"
            ) from error
        namespace = settings.kubernetes_namespace
        templates = load_templates(settings.ray_job_templates, catalogue, namespace=namespace)
        at_run_time = load_run_time_templates(settings.ray_job_templates, namespace=namespace)
        api = RayJobsApi(open_client(settings.kubeconfig), namespace)
        with KubeRayLauncher(api, templates, at_run_time=at_run_time) as kuberay:
            yield kuberay
        return
    token_path = environment.get("RAY_AUTH_TOKEN_PATH", "")  # Ray's own variable
    try:
        token = Path(token_path).read_text().strip() if token_path else ""
    except OSError as error:
        raise SettingsError(f"RAY_AUTH_TOKEN_PATH: cannot read {token_path}: {error.strerror}") from error
    objects = Path(settings.object_store.root) if settings.object_store.kind == "directory" else None
    with RayJobsLauncher(
        settings.ray_address, entrypoint=settings.job_entrypoint, token=token, objects=objects
    ) as ray_jobs:
        yield ray_jobs
