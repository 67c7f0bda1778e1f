"""``/v1/webhook_endpoints`` through the official client, and ``cloister webhooks`` on the same database."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from service.api_keys import Scope, create_api_key
from service.cli.app import app
from service.db import Pool
from service.projects import Project, create_project

URL = "https://receiver.example/hook"


@pytest.fixture
def project(api_pool: Pool, request: pytest.FixtureRequest) -> Project:
    return create_project(api_pool, f"webhooks {request.node.name}")


@pytest.fixture
def admin(base_url: str, api_pool: Pool, project: Project) -> Iterator[openai.OpenAI]:
    key = create_api_key(api_pool, project_id=project.id, name="admin", scopes=[Scope.ADMIN])
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=0) as opened:
        yield opened


def sql(pool: Pool, text: str, *values: Any) -> list[dict[str, Any]]:
    with pool.connection() as connection:
        return connection.execute(text, values).fetchall()


def test_official_client_creates_retrieves_lists_and_deletes_an_endpoint(admin: openai.OpenAI) -> None:
    made = admin.webhooks.create(url=URL, name="mine", event_types=["batch.completed", "batch.failed"])
    found = admin.webhooks.retrieve(made.id)
    assert (found.url, found.name, found.event_types) == (URL, "mine", ["batch.completed", "batch.failed"])
    assert not hasattr(found, "signing_secret")
    assert [each.id for each in admin.webhooks.list()] == [made.id]
    assert admin.webhooks.delete(made.id).deleted
    assert list(admin.webhooks.list()) == []
    with pytest.raises(openai.NotFoundError):
        admin.webhooks.delete(made.id)


def test_secrets_have_256_bits_and_differ(admin: openai.OpenAI) -> None:
    first, second = (admin.webhooks.create(url=URL, name="", event_types=["batch.failed"]) for _ in range(2))
    assert first.signing_secret != second.signing_secret
    assert first.signing_secret.startswith("whsec_")
    assert len(base64.b64decode(first.signing_secret.removeprefix("whsec_"))) == 32


def test_listing_continues_after_a_page(admin: openai.OpenAI) -> None:
    ids = [admin.webhooks.create(url=URL, name="", event_types=["batch.failed"]).id for _ in range(5)]
    assert [each.id for each in admin.webhooks.list(limit=2)] == ids[::-1]
    with pytest.raises(openai.BadRequestError):
        admin.webhooks.list(after="we_none")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"url": "ftp://x", "event_types": ["batch.failed"]}, "url"),
        ({"url": "http://169.254.169.254/", "event_types": ["batch.failed"]}, "url"),
        ({"url": URL, "event_types": []}, "event_types"),
        ({"url": URL, "event_types": ["batch.started"]}, "event_types.0"),
        ({"event_types": ["batch.failed"]}, "url"),
    ],
)
def test_invalid_request_names_its_param(admin: openai.OpenAI, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        admin.post("/webhook_endpoints", body=body, cast_to=object)
    assert raised.value.param == param


def test_endpoints_need_the_admin_scope_of_their_project(
    admin: openai.OpenAI, client: openai.OpenAI, api_pool: Pool, project: Project
) -> None:
    made = admin.webhooks.create(url=URL, name="", event_types=["batch.failed"])
    key = create_api_key(api_pool, project_id=project.id, name="x", scopes=[Scope.READ, Scope.SUBMIT])
    with pytest.raises(openai.PermissionDeniedError):
        client.with_options(api_key=key).webhooks.retrieve(made.id)
    other = create_project(api_pool, f"not {project.name}")
    stranger = client.with_options(
        api_key=create_api_key(api_pool, project_id=other.id, name="x", scopes=[Scope.ADMIN])
    )
    assert list(stranger.webhooks.list()) == []
    for call in (stranger.webhooks.retrieve, stranger.webhooks.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)


def test_creation_and_deletion_are_audited_without_url_and_secret(
    admin: openai.OpenAI, api_pool: Pool, project: Project
) -> None:
    made = admin.webhooks.create(url=URL, name="", event_types=["batch.failed"])
    admin.webhooks.delete(made.id)
    rows = sql(api_pool, "SELECT * FROM audit_log WHERE object_id = %s ORDER BY seq", made.id)
    assert [row["type"] for row in rows] == ["webhook_endpoint.created", "webhook_endpoint.deleted"]
    assert {row["project_id"] for row in rows} == {project.id}
    assert made.signing_secret not in str(rows)


def test_command_line_creates_lists_and_deletes_endpoints(
    api_pool: Pool, project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CLOISTER_DATABASE_URL", api_pool.conninfo)
    (tmp_path / "keys").write_text(base64.b64encode(bytes(32)).decode())
    monkeypatch.setenv("CLOISTER_ENCRYPTION_KEYS_FILE", str(tmp_path / "keys"))

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["webhooks", *arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output.strip()

    made = run("create", URL, "--project", project.name, "--event", "batch.expired", "--name", "mine")
    endpoint_id, secret = made.split()
    assert secret.startswith("whsec_")
    listed = run("list", "--project", project.id)
    assert all(part in listed for part in (endpoint_id, URL, "batch.expired", "mine"))
    assert secret not in listed
    assert run("delete", endpoint_id) == f"deleted {endpoint_id}"
    assert run("list", "--project", project.name) == ""
