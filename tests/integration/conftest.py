"""The real HTTP API on a free loopback port, over real Postgres and an object store in memory."""

import itertools
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import openai
import psycopg
import pytest
import uvicorn

from ray_job.contract.job_spec import ModelSpec
from service.adapters.directory_object_store import DirectoryObjectStore
from service.adapters.memory_object_store import MemoryObjectStore
from service.api.app import Server, create_app
from service.api.wrong_keys import WrongKeys
from service.api_keys import Scope, create_api_key
from service.backends import Backends
from service.db import Pool, open_pool
from service.model_catalogue import CatalogueModel
from service.projects import Project, create_project
from tests.conftest import as_service
from tests.integration.described_answers import DescribedAnswers
from tests.integration.reconciler_harness import KEYS, Stack

_numbers = itertools.count()


@pytest.fixture(autouse=True, scope="session")
def _no_public_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Leave the public certificate authorities out: each new HTTP client would parse them all, which takes 20 ms."""
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("SSL_CERT_FILE", raising=False)
        environment.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("no-authorities")))
        yield


@pytest.fixture(scope="module")
def api_pool(postgres_server_url: str, _template_database: str) -> Iterator[Pool]:
    """A database for all API tests of a file; each test has its own project in it."""
    name = f"api_{next(_numbers)}"
    with psycopg.connect(postgres_server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {_template_database} STRATEGY FILE_COPY")  # type: ignore[arg-type]
        with open_pool(as_service(postgres_server_url.replace("/postgres?", f"/{name}?")), max_size=4) as opened:
            yield opened
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def _served(api_pool: Pool) -> Iterator[tuple[str, MemoryObjectStore]]:
    store = MemoryObjectStore()
    models = {"demo/small": CatalogueModel(spec=ModelSpec(id="demo/small", source="x"))}
    changed_at = datetime(2026, 1, 2, tzinfo=UTC)
    backends = Backends(
        pool=api_pool, store=store, catalogue=models, catalogue_changed_at=changed_at, encryption_keys=KEYS
    )
    app = create_app(backends, wrong_keys=WrongKeys(api_pool, limit=10_000))
    checked = DescribedAnswers(app)
    config = uvicorn.Config(checked, host="127.0.0.1", port=0, log_config=None, access_log=False, ws="none")
    server = Server(config, app.state.watching)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}", store
    server.should_exit = True
    thread.join()
    assert not checked.problems


@pytest.fixture
def base_url(_served: tuple[str, MemoryObjectStore]) -> str:
    """The served API; one model, ``demo/small``, is in its catalogue."""
    return _served[0]


@pytest.fixture
def store(_served: tuple[str, MemoryObjectStore]) -> MemoryObjectStore:
    """The object store of the served API, emptied."""
    emptied = _served[1]
    for key in list(emptied.keys("")):
        emptied.delete(key)
    return emptied


@pytest.fixture
def project(api_pool: Pool) -> Project:
    """A project without files, batches and limits."""
    return create_project(api_pool, f"project {next(_numbers)}")


@pytest.fixture
def api_key(api_pool: Pool, project: Project) -> str:
    """A key of the project with the default scopes, read and submit."""
    return create_api_key(api_pool, project_id=project.id, name="test")


@pytest.fixture
def admin_key(api_pool: Pool, project: Project) -> str:
    """A key of the project with the scope admin only."""
    return create_api_key(api_pool, project_id=project.id, name="admin", scopes=[Scope.ADMIN])


@pytest.fixture
def client(base_url: str, api_key: str) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0) as opened:
        yield opened


@pytest.fixture
def stranger(base_url: str, api_pool: Pool) -> Iterator[openai.OpenAI]:
    """The official client with a key of another project."""
    key = create_api_key(api_pool, project_id=create_project(api_pool, f"another {next(_numbers)}").id, name="test")
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=0) as opened:
        yield opened


@pytest.fixture
def http(base_url: str, api_key: str) -> Iterator[httpx.Client]:
    """Plain HTTP with a valid key, for requests that the official client does not send."""
    with httpx.Client(base_url=base_url, headers={"authorization": f"Bearer {api_key}"}) as opened:
        yield opened


@pytest.fixture
def stack(pool: Pool, tmp_path: Path) -> Stack:
    """A reconciler on an empty database and a directory store; it takes steps only when a test asks for them."""
    return Stack(pool, DirectoryObjectStore(tmp_path / "objects"), tmp_path)
