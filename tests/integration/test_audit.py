"""The audit log, through the official client."""

import hashlib
from collections.abc import Iterator

import httpx
import openai
import psycopg
import pytest

from service.api_keys import create_api_key, list_api_keys, revoke_api_key
from service.db import Pool
from service.projects import Project, archive_project, set_project
from tests.conftest import as_owner

LINE = b'{"custom_id":"a"}\n'


@pytest.fixture
def admin(base_url: str, admin_key: str) -> Iterator[openai.OpenAI]:
    """The official client with a key that can read the audit log."""
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="unused", admin_api_key=admin_key, max_retries=0) as opened:
        yield opened


def delete_a_file(client: openai.OpenAI) -> str:
    file = client.files.create(file=("a.jsonl", LINE), purpose="batch")
    return client.files.delete(file.id).id


def test_deleted_file_is_listed_with_its_digest(
    client: openai.OpenAI, admin: openai.OpenAI, api_pool: Pool, project: Project
) -> None:
    file_id = delete_a_file(client)
    newest = admin.admin.organization.audit_logs.list().data[0]
    assert newest.id.startswith("audit_log-")
    assert newest.type == "file.deleted"  # type: ignore[comparison-overlap]
    assert newest.project is not None
    assert (newest.project.id, newest.project.name) == (project.id, project.name)
    assert newest.actor.api_key is not None
    assert newest.actor.api_key.id in {key.id for key in list_api_keys(api_pool, project_id=project.id)}
    assert newest.actor.session is not None
    assert newest.actor.session.ip_address == "127.0.0.1"
    details = newest.to_dict()["file.deleted"]
    assert isinstance(details, dict)
    assert (details["id"], details["bytes"]) == (file_id, len(LINE))
    assert details["sha256"] == hashlib.sha256(LINE).hexdigest()
    assert details["data"].keys() == {"purpose", "created_at", "reason"}


def test_operator_changes_use_openais_event_types(
    admin: openai.OpenAI, admin_key: str, api_pool: Pool, project: Project
) -> None:
    create_api_key(api_pool, project_id=project.id, name="new", scopes=["read"])  # type: ignore[list-item]
    (key_id,) = [key.id for key in list_api_keys(api_pool, project_id=project.id) if key.name == "new"]
    revoke_api_key(api_pool, key_id)
    revoke_api_key(api_pool, key_id)
    set_project(api_pool, project, {"max_stored_bytes": 5})
    logs = admin.admin.organization.audit_logs.list().data
    assert [log.type for log in logs] == [
        "project.updated", "api_key.deleted", "api_key.created", "api_key.created", "project.created"
    ]  # fmt: skip
    assert {log.actor.type for log in logs} == {"operator"}
    updated, deleted, created = (log.to_dict()[log.type] for log in logs[:3])
    assert updated == {"id": project.id, "changes_requested": {"max_stored_bytes": 5}}
    assert isinstance(created, dict)
    assert created["data"] == {"name": "new", "scopes": ["read"], "expires_at": None}
    assert isinstance(deleted, dict)
    assert deleted["id"] == created["id"] == key_id
    assert admin_key not in str([log.to_dict() for log in logs])


def test_pages_hold_every_event_once_newest_first(client: openai.OpenAI, admin: openai.OpenAI) -> None:
    ids = [delete_a_file(client) for _ in range(5)]
    paged = admin.admin.organization.audit_logs.list(limit=2, event_types=["file.deleted"])  # type: ignore[list-item]
    assert [log.to_dict()["file.deleted"]["id"] for log in paged] == ids[::-1]  # type: ignore[index,call-overload]


def test_page_before_another_can_be_requested(client: openai.OpenAI, admin: openai.OpenAI) -> None:
    for _ in range(5):
        delete_a_file(client)
    listing = admin.admin.organization.audit_logs.list
    ids = [log.id for log in listing()]
    page = listing(before=ids[4], limit=2)
    assert ([log.id for log in page.data], page.has_more) == (ids[2:4], True)
    assert [log.id for log in listing(before=ids[2], limit=5).data] == ids[:2]
    assert [log.id for log in listing(after=ids[0], before=ids[4], limit=5).data] == ids[1:4]


def test_events_can_be_filtered_by_object_actor_project_and_time(
    client: openai.OpenAI, admin: openai.OpenAI, project: Project
) -> None:
    first, second = delete_a_file(client), delete_a_file(client)
    listing = admin.admin.organization.audit_logs.list
    log = listing().data[0]
    assert [found.type for found in listing(resource_ids=[first])] == [
        "file.deleted",
        "file.deletion_requested",
        "file.created",
    ]  # type: ignore[comparison-overlap]
    assert log.actor.api_key is not None
    assert len(listing(actor_ids=[str(log.actor.api_key.id)]).data) == 6
    assert len(listing(project_ids=[project.id]).data) == 9
    assert listing(project_ids=["proj_other"]).data == []
    assert second in str([found.to_dict() for found in listing(effective_at={"gte": log.effective_at})])
    assert listing(effective_at={"gt": log.effective_at}).data == []
    assert listing(effective_at={"lt": 1}).data == listing(effective_at={"lte": 0}).data == []
    assert len(listing(effective_at={"lte": log.effective_at}).data) == 9


def test_events_of_another_project_are_not_listed(stranger: openai.OpenAI, admin: openai.OpenAI) -> None:
    delete_a_file(stranger)
    types = {log.type for log in admin.admin.organization.audit_logs.list()}
    assert types <= {"project.created", "api_key.created"}


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("limit=0", "integer_below_min_value"),
        ("limit=101", "integer_above_max_value"),
        ("after=audit_log-none", "invalid_value"),
        ("before=audit_log-none", "invalid_value"),
        ("effective_at[gt]=x", "invalid_type"),
    ],
)
def test_invalid_listing_is_refused(base_url: str, admin_key: str, query: str, code: str) -> None:
    url = f"{base_url}/v1/organization/audit_logs?{query}"
    answer = httpx.get(url, headers={"authorization": f"Bearer {admin_key}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_owner_of_the_audit_log_cannot_change_it_by_accident(api_pool: Pool, project: Project) -> None:
    archive_project(api_pool, project)
    for statement in ("DELETE FROM audit_log", "UPDATE audit_log SET actor = 'me'", "TRUNCATE audit_log"):
        with (
            pytest.raises(psycopg.errors.RaiseException, match="only be added to"),
            psycopg.connect(as_owner(api_pool)) as connection,
        ):
            connection.execute(statement)  # type: ignore[arg-type]
