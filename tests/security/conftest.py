"""Fixtures of the other folders that attacks need: API, Postgres and reconciler, and Ray with engines."""

from tests.integration.conftest import (
    _no_public_authorities,
    _served,
    admin_key,
    api_key,
    api_pool,
    base_url,
    client,
    http,
    project,
    stack,
    store,
    stranger,
)
from tests.ray.conftest import demo_model, make_job, running_ray, short_directory

__all__ = [
    "_no_public_authorities",
    "_served",
    "admin_key",
    "api_key",
    "api_pool",
    "base_url",
    "client",
    "demo_model",
    "http",
    "make_job",
    "project",
    "running_ray",
    "short_directory",
    "stack",
    "store",
    "stranger",
]
