"""Messages between a job and the coordinator."""

import dataclasses
import json
import math
from typing import Any, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_job.contract.leases import (
    Commit,
    CommitResponse,
    EndRequest,
    EndResponse,
    Failure,
    Lease,
    LeasedFile,
    Message,
    MessageError,
    PartUrls,
    PartUrlsRequest,
    SegmentRef,
    SyncRequest,
    SyncResponse,
)

KINDS = [
    Lease,
    SyncRequest,
    SyncResponse,
    PartUrlsRequest,
    PartUrls,
    Commit,
    CommitResponse,
    Failure,
    EndRequest,
    EndResponse,
]

LEAVES: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(0, 2**63 - 1),
    float: st.floats(0, allow_infinity=False, allow_nan=False),
    bool: st.booleans(),
    str: st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return values of the type of a field."""
    if get_origin(kind) is tuple:
        return st.lists(values(kind.__args__[0]), max_size=3).map(tuple)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return st.builds(kind, **{name: values(hint) for name, hint in get_type_hints(kind).items()})
    return LEAVES[kind]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_message_is_read_as_it_was_written(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(values(kind))
    assert kind.from_json(message.to_json()) == message


def test_message_is_compact_json() -> None:
    assert PartUrlsRequest(batch_id="b", count=2).to_json() == b'{"batch_id":"b","count":2}'


def test_lease_names_its_segment_and_epoch() -> None:
    lease = Lease(
        batch_id="b",
        segment=3,
        epoch=2,
        endpoint="",
        url="",
        start=0,
        end=1,
        rows=1,
        tokens=1,
        done="0",
        cache_salt="",
    )
    assert lease.ref == SegmentRef(batch_id="b", segment=3, epoch=2)


def test_lease_without_files_is_readable_by_an_earlier_version_and_its_lease_by_this_one() -> None:
    plain = Lease(
        batch_id="b",
        segment=3,
        epoch=2,
        endpoint="",
        url="",
        start=0,
        end=1,
        rows=1,
        tokens=1,
        done="0",
        cache_salt="",
    )
    assert {"files", "media_bytes"}.isdisjoint(json.loads(plain.to_json()))
    assert Lease.from_json(plain.to_json()) == plain
    named = dataclasses.replace(plain, files=(LeasedFile(id="file-1", size_bytes=1, url="u"),), media_bytes=9)
    assert json.loads(named.to_json())["files"] == [{"id": "file-1", "size_bytes": 1, "url": "u"}]
    with pytest.raises(MessageError, match="files"):
        Lease.from_json(named.to_json().replace(b'"files":[', b'"files":[3,'))


def test_messages_without_restarts_are_readable_by_an_earlier_version() -> None:
    sync = SyncRequest(wanted_tokens=1, wait_s=0, held=(), engines=1)
    end = EndRequest(engine_s=1, busy_s=1)
    for message in (sync, end):
        assert "engine_restarts" not in json.loads(message.to_json())
        restarted = dataclasses.replace(message, engine_restarts=2)
        assert type(message).from_json(restarted.to_json()) == restarted


@pytest.mark.parametrize(("value", "read"), [(3, 3.0), (0, 0.0), (2.5, 2.5), (2**61, 2.0**61)])
def test_seconds_may_be_whole_numbers(value: float, read: float) -> None:
    message = EndRequest.from_json(json.dumps({"engine_s": value, "busy_s": 0}).encode())
    assert (message.engine_s, type(message.engine_s)) == (read, float)


def sync(**fields: Any) -> bytes:
    return json.dumps({"wanted_tokens": 1, "wait_s": 1, "held": [], "engines": 1} | fields).encode()


REF = {"batch_id": "b", "segment": 0, "epoch": 1}
WRONG = [
    (b"confidential", "the SyncRequest is not JSON"),
    (b"\xff\xfe", "the SyncRequest is not JSON"),
    (b"9" * 5_000, "the SyncRequest is not JSON"),
    (b"[" * 200_000, "the SyncRequest is not JSON"),
    (b"[]", "SyncRequest must be an object"),
    (b"null", "SyncRequest must be an object"),
    (sync(other=1), r"wrong are \['other'\]"),
    (b'{"held":[]}', r"wrong are \['engines', 'wait_s', 'wanted_tokens'\]"),
    (sync(wanted_tokens=1.0), "SyncRequest.wanted_tokens must be of type int"),
    (sync(wanted_tokens=None), "SyncRequest.wanted_tokens must be of type int"),
    (sync(wanted_tokens=False), "SyncRequest.wanted_tokens must be of type int"),
    (sync(wanted_tokens="1234567"), "SyncRequest.wanted_tokens must be of type int"),
    (sync(wanted_tokens=-1), "SyncRequest.wanted_tokens must be a whole number"),
    (sync(wanted_tokens=2**63), "SyncRequest.wanted_tokens must be a whole number"),
    (sync(wait_s=math.nan), "SyncRequest.wait_s must be a finite number"),
    (sync(wait_s=math.inf), "SyncRequest.wait_s must be a finite number"),
    (sync(wait_s=-0.5), "SyncRequest.wait_s must be a finite number"),
    (sync(wait_s=10**400), "SyncRequest.wait_s must be a finite number"),
    (sync(held=REF), "SyncRequest.held must be a list"),
    (sync(held=[REF, 7]), r"SyncRequest.held\[1\] must be an object with the fields of SegmentRef"),
    (sync(held=[REF | {"batch_id": 1234567}]), r"SyncRequest.held\[0\].batch_id must be of type str"),
    (sync(held=[REF | {"batch_id": "confidential\0"}]), r"SyncRequest.held\[0\].batch_id must be text"),
    (sync(held=[REF | {"batch_id": "confidential\ud800"}]), r"SyncRequest.held\[0\].batch_id must be text"),
]


@pytest.mark.parametrize(("text", "problem"), WRONG, ids=range(len(WRONG)))
def test_wrong_message_is_refused_with_its_field_and_without_its_value(text: bytes, problem: str) -> None:
    with pytest.raises(MessageError, match=problem) as refused:
        SyncRequest.from_json(text)
    assert not any(value in str(refused.value) for value in ("confidential", "1234567"))
    # A log of the error must not quote the value either.
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_response_must_have_the_type_of_each_field() -> None:
    with pytest.raises(MessageError, match=r"CommitResponse.accepted\[1\] must be of type bool"):
        CommitResponse.from_json(b'{"accepted":[true,1]}')
