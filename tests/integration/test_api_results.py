"""Results of a batch, while it runs and afterwards."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from ray_job.contract.lines import error_body, response_line
from ray_job.contract.object_keys import file_key, part_key, parts_prefix
from ray_job.contract.parts import PartRow, encode_part
from service.adapters.memory_object_store import MemoryObjectStore
from service.db import Pool
from service.errors import ObjectNotFoundError, ObjectStoreError

REQUEST: dict[str, Any] = {"input_file_id": "file-none", "endpoint": "/v1/completions", "completion_window": "24h"}


def row(batch_id: str, line: int, *, fails: bool = False) -> PartRow:
    body = error_body("no", type="x", param=None, code=None) if fails else b'{"text":"\xc3\xbc"}'
    data = response_line(batch_id, line, f"id-{line}", 400 if fails else 200, body)
    return PartRow(line=line, outcome="failed" if fails else "completed", data=data)


def put_part(
    pool: Pool, store: MemoryObjectStore, batch_id: str, rows: list[PartRow], *, refused: list[int] | None = None
) -> None:
    key = part_key(batch_id, [row.line for row in rows])
    store.put(key, [encode_part(batch_id, rows)])
    with pool.connection() as connection:
        connection.execute(
            "INSERT INTO parts (key, batch_id, accepted, refused_lines) VALUES (%s, %s, '{true}', %s)",
            [key, batch_id, refused or []],
        )


def ids(answer: httpx.Response) -> list[str]:
    return [json.loads(line)["custom_id"] for line in answer.content.splitlines()]


@pytest.fixture
def batch_id(client: openai.OpenAI, api_pool: Pool, store: MemoryObjectStore) -> str:
    """A running batch with five lines in two parts; one of them failed."""
    batch = client.batches.create(**REQUEST)
    with api_pool.connection() as connection:
        connection.execute("UPDATE batches SET status = 'in_progress', total = 9 WHERE id = %s", [batch.id])
    put_part(api_pool, store, batch.id, [row(batch.id, 9), row(batch.id, 2)])
    put_part(api_pool, store, batch.id, [row(batch.id, 5, fails=True), row(batch.id, 1), row(batch.id, 4)])
    return batch.id


@pytest.fixture
def end_batch(api_pool: Pool, store: MemoryObjectStore, batch_id: str) -> Callable[[], None]:
    """End the batch as the reconciler does: write the output file, set the state, delete the parts."""

    def end() -> None:
        content = b"".join(row(batch_id, line).data + b"\n" for line in (1, 2, 3))
        stored = store.put(file_key("file-of-" + batch_id), [content])
        with api_pool.connection() as connection:
            connection.execute(
                "INSERT INTO files (id, project_id, purpose, filename, size_bytes, sha256)"
                " SELECT 'file-of-' || id, project_id, 'batch_output', 'a', %s, %s FROM batches WHERE id = %s",
                [stored.size_bytes, stored.sha256, batch_id],
            )
            connection.execute(
                "UPDATE batches SET status = 'completed', output_file_id = 'file-of-' || id, completed = 3"
                " WHERE id = %s",
                [batch_id],
            )
        for key in list(store.keys(parts_prefix(batch_id))):
            store.delete(key)

    return end


@pytest.fixture
def ended_during(
    store: MemoryObjectStore, batch_id: str, end_batch: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> str:
    """The id of a batch that ends when its next part is opened."""
    original = store.read

    def interrupted(key: str, **options: int) -> Iterator[bytes]:
        monkeypatch.undo()
        end_batch()
        return original(key, **options)

    monkeypatch.setattr(store, "read", interrupted)
    return batch_id


def test_lines_so_far_come_in_input_order(http: httpx.Client, batch_id: str) -> None:
    answer = http.get(f"/v1/batches/{batch_id}/results")
    assert ids(answer) == ["id-1", "id-2", "id-4", "id-9"]
    assert answer.headers["content-type"] == "application/jsonl"
    assert (answer.headers["x-cloister-lines"], answer.headers["x-cloister-complete"]) == ("4", "false")
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_failed_lines_are_the_other_kind(http: httpx.Client, batch_id: str) -> None:
    answer = http.get(f"/v1/batches/{batch_id}/results?kind=error")
    assert ids(answer) == ["id-5"]
    assert answer.headers["x-cloister-lines"] == "1"


def test_batch_without_results_has_no_lines(http: httpx.Client, client: openai.OpenAI) -> None:
    answer = http.get(f"/v1/batches/{client.batches.create(**REQUEST).id}/results")
    assert (answer.status_code, answer.content, answer.headers["x-cloister-lines"]) == (200, b"", "0")


def test_ended_batch_returns_its_file(
    http: httpx.Client, client: openai.OpenAI, batch_id: str, end_batch: Callable[[], None]
) -> None:
    end_batch()
    answer = http.get(f"/v1/batches/{batch_id}/results")
    assert answer.content == client.files.content("file-of-" + batch_id).content
    assert (answer.headers["x-cloister-lines"], answer.headers["x-cloister-complete"]) == ("3", "true")
    nothing = http.get(f"/v1/batches/{batch_id}/results?kind=error")
    assert (nothing.content, nothing.headers["x-cloister-complete"]) == (b"", "true")


def test_batch_that_ends_during_the_request_is_returned_whole(
    http: httpx.Client, store: MemoryObjectStore, ended_during: str
) -> None:
    answer = http.get(f"/v1/batches/{ended_during}/results")
    assert ids(answer) == ["id-1", "id-2", "id-3"]
    assert answer.headers["x-cloister-complete"] == "true"
    assert not list(store.keys(parts_prefix(ended_during)))


def test_rows_that_do_not_count_are_left_out(
    http: httpx.Client, api_pool: Pool, store: MemoryObjectStore, batch_id: str
) -> None:
    put_part(api_pool, store, batch_id, [row(batch_id, 6), row(batch_id, 7)], refused=[6])
    store.put(part_key(batch_id, [8]), [encode_part(batch_id, [row(batch_id, 8)])])
    assert ids(http.get(f"/v1/batches/{batch_id}/results")) == ["id-1", "id-2", "id-4", "id-7", "id-9"]


def test_missing_part_of_a_running_batch_is_an_error(
    http: httpx.Client, store: MemoryObjectStore, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(key: str, **_: int) -> Iterator[bytes]:
        raise ObjectNotFoundError(key)

    monkeypatch.setattr(store, "read", refuse)
    assert http.get(f"/v1/batches/{batch_id}/results").status_code == 503


def test_damaged_part_is_an_error(http: httpx.Client, store: MemoryObjectStore, batch_id: str) -> None:
    key = next(iter(store.keys(parts_prefix(batch_id))))
    store.put(key, [b"".join(store.read(key)).replace(b"id-1", b"id-7")])
    answer = http.get(f"/v1/batches/{batch_id}/results")
    assert answer.status_code == 500
    assert "damaged" in answer.json()["error"]["message"]


def test_deleted_file_is_not_found(
    http: httpx.Client, client: openai.OpenAI, batch_id: str, end_batch: Callable[[], None]
) -> None:
    end_batch()
    client.files.delete("file-of-" + batch_id)
    answer = http.get(f"/v1/batches/{batch_id}/results")
    assert answer.status_code == 404
    assert "was deleted or has expired" in answer.json()["error"]["message"]


def test_results_are_invisible_to_other_projects_and_have_two_kinds(
    http: httpx.Client, stranger: openai.OpenAI, batch_id: str
) -> None:
    refused = http.get(f"/v1/batches/{batch_id}/results?kind=all")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kind")
    key = {"authorization": f"Bearer {stranger.api_key}"}
    assert http.get(f"/v1/batches/{batch_id}/results", headers=key).status_code == 404


@pytest.fixture
def breaking(store: MemoryObjectStore, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Break the next reads after ten bytes each, this many times in a row."""

    def arm(times: int) -> None:
        original, left = store.read, times

        def broken(key: str, *, start: int = 0) -> Iterator[bytes]:
            nonlocal left
            if not left:
                return original(key, start=start)
            left -= 1
            return cut(original(key, start=start), to_bytes=0 if start else 10)

        monkeypatch.setattr(store, "read", broken)

    return arm


def cut(chunks: Iterator[bytes], *, to_bytes: int) -> Iterator[bytes]:
    if to_bytes:
        yield next(chunks)[:to_bytes]
    raise ObjectStoreError("the connection broke")


@pytest.mark.parametrize("path", ["/v1/files/file-of-{id}/content", "/v1/batches/{id}/results"])
def test_download_survives_store_failures(
    http: httpx.Client, batch_id: str, end_batch: Callable[[], None], breaking: Callable[[int], None], path: str
) -> None:
    end_batch()
    whole = http.get(path.replace("{id}", batch_id)).content
    breaking(2)
    answer = http.get(path.replace("{id}", batch_id))
    assert (answer.status_code, answer.content) == (200, whole)


@pytest.mark.parametrize("path", ["/v1/files/file-of-{id}/content", "/v1/batches/{id}/results"])
def test_failed_download_is_cut_short_of_its_length(
    http: httpx.Client, batch_id: str, end_batch: Callable[[], None], breaking: Callable[[int], None], path: str
) -> None:
    end_batch()
    breaking(3)
    with pytest.raises(httpx.RemoteProtocolError):
        http.get(path.replace("{id}", batch_id))
