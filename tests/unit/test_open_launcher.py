"""Choice of the launcher by the settings."""

import json
from pathlib import Path

import pytest

from service.adapters.kuberay_launcher import KubeRayLauncher
from service.adapters.open_launcher import open_launcher
from service.adapters.ray_jobs_launcher import RayJobsLauncher
from service.errors import SettingsError
from service.model_catalogue import parse_catalogue
from service.settings import Settings, read_settings

REQUIRED = {
    "CLOISTER_DATABASE_URL": "postgresql://cloister@db/cloister",
    "CLOISTER_OBJECT_STORE": "file:///var/lib/cloister",
    "CLOISTER_MODELS": "/etc/cloister/models.yaml",
}


def kuberay(tmp_path: Path, *, kubeconfig: bool) -> Settings:
    environment = {
        **REQUIRED,
        "CLOISTER_LAUNCHER": "kuberay",
        "CLOISTER_KUBERNETES_NAMESPACE": "jobs",
        "CLOISTER_RAY_JOB_TEMPLATES": str(tmp_path),
    }
    if kubeconfig:
        path = tmp_path / "kubeconfig"
        path.write_text(
            json.dumps(
                {
                    "current-context": "a",
                    "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
                    "clusters": [{"name": "a", "cluster": {"server": "http://127.0.0.1:1"}}],
                    "users": [{"name": "a", "user": {}}],
                }
            )
        )
        environment["CLOISTER_KUBECONFIG"] = str(path)
    return read_settings(environment)


def test_default_launcher_uses_an_existing_ray() -> None:
    with open_launcher(read_settings(REQUIRED), {}, {}) as launcher:
        assert isinstance(launcher, RayJobsLauncher)


def test_missing_token_file_is_reported() -> None:
    with (
        pytest.raises(SettingsError, match="RAY_AUTH_TOKEN_PATH: cannot read /no/such/file"),
        open_launcher(read_settings(REQUIRED), {}, {"RAY_AUTH_TOKEN_PATH": "/no/such/file"}),
    ):
        pass


def test_kuberay_uses_the_namespace_of_the_settings(tmp_path: Path) -> None:
    with open_launcher(kuberay(tmp_path, kubeconfig=True), {}, {}) as launcher:
        assert isinstance(launcher, KubeRayLauncher)


def test_kuberay_needs_a_template(tmp_path: Path) -> None:
    catalogue = parse_catalogue({"models": [{"id": "demo", "source": "/models/demo"}]})
    with (
        pytest.raises(SettingsError, match="templates do not fit the model catalogue"),
        open_launcher(kuberay(tmp_path, kubeconfig=True), catalogue, {}),
    ):
        pass


def test_kuberay_needs_access_to_kubernetes(tmp_path: Path) -> None:
    with (
        pytest.raises(SettingsError, match="a pod with a service account's token"),
        open_launcher(kuberay(tmp_path, kubeconfig=False), {}, {}),
    ):
        pass
