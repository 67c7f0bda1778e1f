"""Opens the launcher that the settings name."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from service.adapters.ray_jobs_launcher import RayJobsLauncher
from service.errors import SettingsError
from service.model_catalogue import Catalogue
from service.ports import Launcher
from service.settings import Settings

# Jobs on a Ray that already runs find the password of their database role by this file. A RayJob's template has its
# own.
_PASSED_ON: Final = ("PGPASSFILE",)


@contextlib.contextmanager
def open_launcher(settings: Settings, catalogue: Catalogue, environment: Mapping[str, str]) -> Iterator[Launcher]:
    """The launcher, open until the end of the context. Neither Ray nor Kubernetes needs to answer yet.

    Args:
        settings: which launcher, and where it finds Ray or Kubernetes.
        catalogue: the models that jobs will run.
        environment: this process's own.

    Raises:
        SettingsError: a template or a token is missing or wrong, or there is no way to reach Kubernetes.
    """
    if settings.launcher == "kuberay":
        with _open_kuberay(settings, catalogue) as launcher:
            yield launcher
        return
    passed_on = {name: environment[name] for name in _PASSED_ON if name in environment}
    token = _ray_token(environment)
    with RayJobsLauncher(
        settings.ray_address, entrypoint=settings.job_entrypoint, environment=passed_on, token=token
    ) as ray_jobs:
        yield ray_jobs


def _open_kuberay(settings: Settings, catalogue: Catalogue) -> contextlib.AbstractContextManager[Launcher]:
    try:
        from service.adapters.kuberay_launcher import KubeRayLauncher
        from service.adapters.rayjob_templates import load_templates
        from service.adapters.rayjobs_api import RayJobsApi, open_client
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"CLOISTER_LAUNCHER: kuberay needs the package {error.name}; install cloister[cluster]"
        ) from error
    namespace = settings.kubernetes_namespace
    templates = load_templates(settings.ray_job_templates, catalogue, namespace=namespace)
    return KubeRayLauncher(RayJobsApi(open_client(settings.kubeconfig), namespace), templates)


def _ray_token(environment: Mapping[str, str]) -> str:
    """The token of a Ray with token authentication, from the file that Ray's own variable names."""
    path = environment.get("RAY_AUTH_TOKEN_PATH", "")
    try:
        return Path(path).read_text().strip() if path else ""
    except OSError as error:
        raise SettingsError(f"RAY_AUTH_TOKEN_PATH: cannot read {path}: {error.strerror}") from error
