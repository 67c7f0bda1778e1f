"""The settings of the service."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from ray_job.contract.job_spec import ObjectStoreLocation
from service.errors import SettingsError
from service.settings import parse_object_store_url, read_settings

REQUIRED = {
    "CLOISTER_DATABASE_URL": "postgresql://cloister:secret@db/cloister",
    "CLOISTER_OBJECT_STORE": "file:///var/lib/cloister",
    "CLOISTER_MODELS": "/etc/cloister/models.yaml",
}


def test_optional_settings_have_defaults() -> None:
    settings = read_settings(REQUIRED)
    assert settings.models_path == Path("/etc/cloister/models.yaml")
    assert settings.object_store == ObjectStoreLocation(kind="directory", root="/var/lib/cloister")
    assert (settings.host, settings.port, settings.log_level) == ("127.0.0.1", 8000, "info")
    assert settings.ray_address == "http://127.0.0.1:8265"


def test_workspace_is_the_whole_disk_by_default() -> None:
    assert read_settings(REQUIRED).workspace_bytes is None
    assert read_settings({**REQUIRED, "CLOISTER_WORKSPACE_GIB": "3"}).workspace_bytes == 3 * 2**30


def test_password_is_not_in_the_representation() -> None:
    assert "secret" not in repr(read_settings(REQUIRED))


def test_all_invalid_settings_are_reported_together() -> None:
    wrong = {
        "CLOISTER_OBJECT_STORE": "ftp://somewhere",
        "CLOISTER_PORT": "70000",
        "CLOISTER_RAY_ADDRESS": "ray://head:10001",
        "CLOISTER_LOG_LEVEL": "loud",
        "CLOISTER_COORDINATOR_URL": "coordinator:8100",
    }
    with pytest.raises(SettingsError) as caught:
        read_settings(wrong)
    for name in (*wrong, *REQUIRED):
        assert name in str(caught.value)


@pytest.mark.parametrize("value", ["0", "65536", "x", "8000.5", "-1"])
def test_number_out_of_range_is_reported_with_its_limits(value: str) -> None:
    with pytest.raises(SettingsError, match=f"CLOISTER_PORT must be a whole number from 1 to 65535, not '{value}'"):
        read_settings({**REQUIRED, "CLOISTER_PORT": value})


def test_traces_are_off_by_default_and_their_settings_are_checked() -> None:
    assert (read_settings(REQUIRED).otlp_endpoint, read_settings(REQUIRED).trace_segments) == ("", 0.01)
    wrong = {"CLOISTER_OTLP_ENDPOINT": "collector:4318", "CLOISTER_TRACE_SEGMENTS": "2"}
    with pytest.raises(SettingsError, match=r"(?s)must start with http.*must be less than or equal to 1"):
        read_settings(REQUIRED | wrong)


def test_empty_variable_counts_as_not_set() -> None:
    assert read_settings({**REQUIRED, "CLOISTER_PORT": "", "CLOISTER_LAUNCHER": ""}).port == 8000
    with pytest.raises(SettingsError, match="CLOISTER_MODELS is not set"):
        read_settings({**REQUIRED, "CLOISTER_MODELS": ""})


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        read_settings(REQUIRED).port = 1


def test_launcher_is_ray_jobs_by_default() -> None:
    assert read_settings(REQUIRED).launcher == "ray_jobs"


def test_launcher_kuberay_has_a_namespace_and_templates(tmp_path: Path) -> None:
    kuberay = {
        "CLOISTER_LAUNCHER": "kuberay",
        "CLOISTER_KUBERNETES_NAMESPACE": "cloister-acme-dev-jobs",
        "CLOISTER_RAY_JOB_TEMPLATES": str(tmp_path),
    }
    settings = read_settings({**REQUIRED, **kuberay})
    assert (settings.launcher, settings.kubernetes_namespace) == ("kuberay", "cloister-acme-dev-jobs")
    assert (settings.ray_job_templates, settings.kubeconfig) == (tmp_path, None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"CLOISTER_LAUNCHER": "slurm"},
        {"CLOISTER_KUBERNETES_NAMESPACE": "No_Namespace", "CLOISTER_RAY_JOB_TEMPLATES": "/missing/directory"},
        {"CLOISTER_KUBERNETES_NAMESPACE": "", "CLOISTER_RAY_JOB_TEMPLATES": "", "CLOISTER_KUBECONFIG": "/no/file"},
    ],
)
def test_all_launcher_problems_are_reported_together(wrong: dict[str, str]) -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings({**REQUIRED, "CLOISTER_LAUNCHER": "kuberay", **wrong})
    assert all(name in str(caught.value) for name in wrong)


def test_settings_of_the_other_launcher_are_not_checked() -> None:
    assert read_settings({**REQUIRED, "CLOISTER_RAY_JOB_TEMPLATES": "/missing"}).launcher == "ray_jobs"


def test_invalid_connection_string_is_reported_without_its_password() -> None:
    with pytest.raises(SettingsError, match="CLOISTER_DATABASE_URL is not a libpq") as caught:
        read_settings({**REQUIRED, "CLOISTER_DATABASE_URL": "secret nonsense"})
    assert "secret" not in str(caught.value)


def test_s3_url_has_prefix_endpoint_and_region() -> None:
    url = "s3://bucket/some/prefix/?endpoint_url=https%3A%2F%2Fs3.internal:9000&region=eu-central-1"
    assert parse_object_store_url(url) == ObjectStoreLocation(
        kind="s3",
        bucket="bucket",
        prefix="some/prefix",
        endpoint_url="https://s3.internal:9000",
        region="eu-central-1",
    )


@pytest.mark.parametrize(
    "url", ["", "/var/lib", "file://host/dir", "file:///", "s3:///prefix", "s3://b?color=red", "s3://b?endpoint_url=x"]
)
def test_invalid_object_store_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"s3://|endpoint_url must start"):
        parse_object_store_url(url)
