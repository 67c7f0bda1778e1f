"""Messages between a job and the coordinator, as JSON over HTTP.

The coordinator knows the job by its token, which each request carries: ``Authorization: Bearer {token}``.

    POST /sync       SyncRequest → SyncResponse    extend leases, and take new ones; waits until there is work
    POST /part-urls  PartUrlsRequest → PartUrls    places for part objects of a batch
    POST /commits    Commit → CommitResponse       record a part that was written
    POST /failures   Failure → {}                  give a segment back that cannot be run
    POST /end        EndRequest → EndResponse      end, if there is no work

A refused token answers 401: the job has ended, and its driver stops. 503 means to try again later. URLs are those of
S3, or ``file:///…`` for a directory.
"""

import dataclasses
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Final, Self, get_args, get_origin, get_type_hints

from ray_job.contract.parts import Usage

TOKEN_VARIABLE: Final = "CLOISTER_JOB_TOKEN"  # noqa: S105 - a name
"""The variable with the token, in the environment of the driver only."""

TOKEN_FILE_VARIABLE: Final = "CLOISTER_JOB_TOKEN_FILE"  # noqa: S105 - a name
"""The path of a file that holds the token: on Kubernetes, secrets are files."""

SYNC_PATH: Final = "/sync"
PART_URLS_PATH: Final = "/part-urls"
COMMITS_PATH: Final = "/commits"
FAILURES_PATH: Final = "/failures"
END_PATH: Final = "/end"

# The integers of Postgres are signed and have 64 bits.
_MAX_INTEGER_BITS: Final = 63
# Postgres has no NUL in a text, and UTF-8 no half of a surrogate pair.
_TEXT: Final = re.compile("[^\\0\ud800-\udfff]*")


# Marks a field that is not sent with its default, because a reader of an earlier version does not know it.
_OMITTED_DEFAULT: Final = {"is_omitted_with_default": True}


class MessageError(ValueError):
    """A message with a missing, unknown or wrong field. It names the field and quotes no value."""


class Message:
    """A dataclass that is sent as a JSON object with its fields."""

    def to_json(self) -> bytes:
        """Write the message as JSON."""
        return json.dumps(self, default=_fields, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read what ``to_json`` has written.

        Raises:
            MessageError: not JSON, or a field is missing, unknown or wrong.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError):
            raise MessageError(f"the {cls.__name__} is not JSON") from None
        message: Self = _read(cls, raw, cls.__name__)
        return message


def _fields(message: Any) -> dict[str, Any]:
    """Return the fields of a message, or of a dataclass in it, that are sent."""
    values = {each: getattr(message, each.name) for each in dataclasses.fields(message)}
    return {each.name: value for each, value in values.items() if not each.metadata or value != each.default}


def _read(kind: Any, raw: Any, place: str) -> Any:
    """Return a JSON value as an instance of a type of this module's fields."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        if isinstance(raw, dict):
            for each in dataclasses.fields(kind):
                if each.metadata and each.name not in raw:
                    del hints[each.name]
        if not isinstance(raw, dict) or raw.keys() != hints.keys():
            fields = sorted(raw.keys() ^ hints.keys()) if isinstance(raw, dict) else []
            raise MessageError(f"{place} must be an object with the fields of {kind.__name__}; wrong are {fields}")
        return kind(**{name: _read(hint, raw[name], f"{place}.{name}") for name, hint in hints.items()})
    if get_origin(kind) is tuple:
        if not isinstance(raw, list):
            raise MessageError(f"{place} must be a list")
        item = get_args(kind)[0]
        return tuple(_read(item, each, f"{place}[{index}]") for index, each in enumerate(raw))
    if kind is float and type(raw) is int:
        raw = float(raw) if raw.bit_length() < _MAX_INTEGER_BITS else math.inf
    if type(raw) is not kind:
        raise MessageError(f"{place} must be of type {kind.__name__}")
    if kind is str and not _TEXT.fullmatch(raw):
        raise MessageError(f"{place} must be text without the characters that Postgres cannot store")
    if kind is int and not 0 <= raw < 1 << _MAX_INTEGER_BITS:
        raise MessageError(f"{place} must be a whole number from 0 to 2^{_MAX_INTEGER_BITS} - 1")
    if kind is float and not 0 <= raw < math.inf:
        raise MessageError(f"{place} must be a finite number of at least 0")
    return raw


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRef:
    """A segment under one of its leases.

    Attributes:
        batch_id: its batch.
        segment: its number in the batch's plan, from 0.
        epoch: the lease.
    """

    batch_id: str
    segment: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedFile:
    """An uploaded file that rows of a segment name as an image.

    Attributes:
        id: its id.
        size_bytes: its size; 0 if it is gone.
        url: where it is read; the URL expires. Empty if the file is gone.
    """

    id: str
    size_bytes: int
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease(Message):
    """The right to run a segment.

    Attributes:
        batch_id: its batch.
        segment: its number in the batch's plan, from 0.
        epoch: the number of this lease of the segment.
        endpoint: the endpoint of its rows, e.g. ``/v1/chat/completions``.
        url: where the plan is read; it expires.
        start: the first byte of the segment in the plan.
        end: the byte after its last one.
        rows: the number of its rows.
        tokens: about how many tokens its rows take.
        done: rows that earlier leases have committed, as a bitmap (see ``plans.bitmap``).
        cache_salt: vLLM's ``cache_salt`` for its rows, so that projects share no prefix cache; empty for none.
        files: the uploaded files that its rows name.
        media_bytes: by so many bytes the content of these files enlarges its rows.
        is_traced: whether commits of its rows carry ``SegmentTimes``.
    """

    batch_id: str
    segment: int
    epoch: int
    endpoint: str
    url: str
    start: int
    end: int
    rows: int
    tokens: int
    done: str
    cache_salt: str
    files: tuple[LeasedFile, ...] = field(default=(), metadata=_OMITTED_DEFAULT)
    media_bytes: int = field(default=0, metadata=_OMITTED_DEFAULT)
    is_traced: bool = field(default=False, metadata=_OMITTED_DEFAULT)

    @property
    def ref(self) -> SegmentRef:
        """The segment and the epoch."""
        return SegmentRef(batch_id=self.batch_id, segment=self.segment, epoch=self.epoch)

    @property
    def size_bytes(self) -> int:
        """Bytes of its rows with the content of their files."""
        return self.end - self.start + self.media_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRequest(Message):
    """Leases that a job holds, and the work that it wants.

    Attributes:
        wanted_tokens: lease segments until they have about so many tokens; 0 for none.
        wait_s: if there is none to lease, wait for one so long at most.
        held: the leases to extend.
        engines: engines that are ready.
        engine_restarts: engines that died and were started again since the last answer.
    """

    wanted_tokens: int
    wait_s: float
    held: tuple[SegmentRef, ...]
    engines: int
    engine_restarts: int = field(default=0, metadata=_OMITTED_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncResponse(Message):
    """The answer to a ``SyncRequest``.

    Attributes:
        leases: new leases.
        lost: those of ``held`` that the job no longer holds; their rows are to be dropped.
        backlog_tokens: about how many tokens are left to lease for this job. Of a long queue only the first 1,000
            segments are counted.
        drain: take no more work, and end when what is held is committed.
        prompt_rules_url: where the job writes the prompt rules of its model; empty if they are known.
    """

    leases: tuple[Lease, ...]
    lost: tuple[SegmentRef, ...]
    backlog_tokens: int
    drain: bool
    prompt_rules_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartUrlsRequest(Message):
    """A request for places of so many part objects of a batch."""

    batch_id: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartUrl:
    """Place of one part object: its key, and a URL that expires."""

    key: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartUrls(Message):
    """Places for part objects; none if the batch has ended."""

    parts: tuple[PartUrl, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedRows:
    """Rows of one segment in a part.

    Attributes:
        segment: the segment.
        epoch: the lease under which the rows ran.
        rows: the rows, as a bitmap (see ``plans.bitmap``).
        lines: the numbers of their lines in the input file, with those of their twins.
        completed: lines with a response of status 2xx.
        failed: the other lines.
        usage: the tokens of all these lines.
    """

    segment: int
    epoch: int
    rows: str
    lines: tuple[int, ...]
    completed: int
    failed: int
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTimes:
    """The work on a traced segment, as times in seconds before its commit was sent, when the part was just written.

    They need no clock that job and coordinator share.

    Attributes:
        segment: the segment.
        leased_s: the job got its lease.
        read_s: its rows were read.
        sent_s: the first of them went to an engine.
        ready_s: those of the part were answered.
    """

    segment: int
    leased_s: float
    read_s: float
    sent_s: float
    ready_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(Message):
    """The record of a part that was written.

    Attributes:
        batch_id: its batch.
        key: its key, from ``PartUrls``.
        segments: its rows by segment.
        times: the work on those of its segments that are traced.
    """

    batch_id: str
    key: str
    segments: tuple[CommittedRows, ...]
    times: tuple[SegmentTimes, ...] = field(default=(), metadata=_OMITTED_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResponse(Message):
    """Which of the segments of a commit count. A repeated commit of a part gets the answer of the first one."""

    accepted: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Message):
    """A segment that cannot be run, and why. The reason is for the batch's owner and quotes no prompt."""

    batch_id: str
    segment: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRequest(Message):
    """The wish to end.

    Attributes:
        engine_s: the time for which engines were ready, summed over all engines of the job.
        busy_s: the time for which the job held leases and had a ready engine.
        engine_restarts: engines that died and were started again since the last answer.
    """

    engine_s: float
    busy_s: float
    engine_restarts: int = field(default=0, metadata=_OMITTED_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndResponse(Message):
    """Answer to the end of a job: if it has not ended, there is work for it."""

    ended: bool
