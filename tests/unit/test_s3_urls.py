"""Hosts of presigned URLs on AWS."""

from urllib.parse import urlsplit

import pytest

from ray_job.contract.job_spec import ObjectStoreLocation
from service.adapters.s3_object_store import S3ObjectStore


@pytest.mark.parametrize(
    ("bucket", "start"),
    [
        ("bucket", "https://bucket.s3.eu-central-1.amazonaws.com/prefix/files/a"),
        ("with.dots", "https://s3.eu-central-1.amazonaws.com/with.dots/prefix/files/a"),
    ],
)
def test_urls_name_the_host_of_the_region(monkeypatch: pytest.MonkeyPatch, bucket: str, start: str) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    store = S3ObjectStore(ObjectStoreLocation(kind="s3", bucket=bucket, prefix="prefix", region="eu-central-1"))
    for url in (store.read_url("files/a", expires_s=60), store.write_url("files/a", expires_s=60)):
        assert urlsplit(url)._replace(query="").geturl() == start
