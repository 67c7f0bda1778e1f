"""The real API over real Postgres, and a reconciler that takes steps only when a test asks for them."""

from tests.integration.conftest import (
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

__all__ = [
    "_served",
    "admin_key",
    "api_key",
    "api_pool",
    "base_url",
    "client",
    "http",
    "project",
    "stack",
    "store",
    "stranger",
]
