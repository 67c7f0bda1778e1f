"""The settings of the service."""

from pathlib import Path

import pytest

from ray_job.contract.job_spec import ObjectStoreLocation
from service.errors import SettingsError
from service.settings import parse_object_store_url, read_settings

REQUIRED = {
    "CLOISTER_DATABASE_URL": "postgresql://cloister:secret@db/cloister",
    "CLOISTER_OBJECT_STORE": "file:///var/lib/cloister",
    "CLOISTER_MODELS": "/etc/cloister/models.yaml",
}


def test_the_rest_has_defaults() -> None:
    settings = read_settings(REQUIRED)
    assert settings.models_path == Path("/etc/cloister/models.yaml")
    assert settings.object_store == ObjectStoreLocation(kind="directory", root="/var/lib/cloister")
    assert (settings.host, settings.port, settings.log_level) == ("127.0.0.1", 8000, "info")
    assert settings.ray_address == "http://127.0.0.1:8265"


def test_a_password_is_not_shown() -> None:
    assert "secret" not in repr(read_settings(REQUIRED))


def test_all_wrong_settings_are_told_at_once() -> None:
    wrong = {
        "CLOISTER_OBJECT_STORE": "ftp://somewhere",
        "CLOISTER_PORT": "70000",
        "CLOISTER_RAY_ADDRESS": "ray://head:10001",
        "CLOISTER_LOG_LEVEL": "loud",
        "CLOISTER_JOB_DATABASE_URL": "postgresql://job:hidden@db/cloister",
    }
    with pytest.raises(SettingsError) as caught:
        read_settings(wrong)
    for name in (*wrong, *REQUIRED):
        assert name in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_a_broken_connection_string_is_told_without_its_password() -> None:
    with pytest.raises(SettingsError, match="CLOISTER_DATABASE_URL is not a libpq") as caught:
        read_settings({**REQUIRED, "CLOISTER_DATABASE_URL": "secret nonsense"})
    assert "secret" not in str(caught.value)


def test_an_s3_url_takes_a_prefix_an_endpoint_and_a_region() -> None:
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
def test_a_wrong_object_store_url_is_refused(url: str) -> None:
    with pytest.raises(SettingsError):
        parse_object_store_url(url)
