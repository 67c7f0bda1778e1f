"""``GET /v1/organization/usage/completions`` and ``/v1/organization/costs``: usage and costs by day.

The shapes are OpenAI's. A bucket is a day in UTC, and ``x_cloister`` has GPU seconds.
Source: https://platform.openai.com/docs/api-reference/usage.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import groupby
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from service.api.dependencies import BackendsDependency, UsageAccess
from service.api.extension import Amount
from service.api.openapi import WITH_KEY, described
from service.api.schemas import NEWEST, Answer, Text
from service.api_keys import Access
from service.db.rows import UsageRow
from service.errors import InvalidRequestError
from service.scopes import Scope
from service.usage import read_usage

router = APIRouter(prefix="/v1/organization", tags=["Usage"], responses=WITH_KEY)

T = TypeVar("T")
UnixTime = Annotated[int, Field(ge=0, lt=NEWEST)]

_DAY: Final = timedelta(days=1)
_CURSOR_PREFIX: Final = "page_"
_INVALID: Final = (
    "A parameter is wrong, or `page` is not a `next_page` (`invalid_value`), or a filter or group does not exist here."
)


class UsageExtension(Answer):
    """cloister's fields of a usage result."""

    gpu_seconds: float
    """GPUs multiplied by the seconds for which jobs held them for the batches."""
    overhead_gpu_seconds: float
    """The same for seconds in which jobs worked for no batch."""
    batches: int
    """Batches that ended."""
    failed_requests: int
    """Requests of these batches that ended with an error."""


class CompletionsUsage(Answer):
    """Usage of the batches that ended in a bucket. Fields that the result is not grouped by are null."""

    object: Literal["organization.usage.completions.result"] = "organization.usage.completions.result"
    input_tokens: int
    """Tokens of prompts, also those from a cache."""
    input_cached_tokens: int
    """Tokens of prompts that engines found in their prefix cache."""
    output_tokens: int
    num_model_requests: int
    """Requests that were answered."""
    project_id: str | None
    """Empty for the stack itself, and for projects that were erased."""
    model: str | None
    batch: bool | None
    """Always true if it is grouped by `batch`."""
    user_id: None = None
    api_key_id: None = None
    x_cloister: UsageExtension


class CostsExtension(Answer):
    """cloister's fields of a result of costs."""

    gpu_seconds: float
    """The GPU seconds that the amount is for."""


class Costs(Answer):
    """Costs of the batches that ended in a bucket, and of overhead. Without a price there are none."""

    object: Literal["organization.costs.result"] = "organization.costs.result"
    amount: Amount
    line_item: str | None
    """Model and kind of costs, `batches` or `overhead`: `llama-3.1-8b, batches`."""
    project_id: str | None
    """Empty for the stack itself, and for projects that were erased."""
    x_cloister: CostsExtension


class Bucket(Answer, Generic[T]):
    """A day in UTC."""

    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    """When the next day begins."""
    results: list[T]


class BucketPage(Answer, Generic[T]):
    """Some buckets, the oldest first."""

    object: Literal["page"] = "page"
    data: list[Bucket[T]]
    has_more: bool
    next_page: str | None
    """The `page` of the next buckets; null if there are no more."""


class BucketQuery(BaseModel):
    """The query parameters that both routes share. Lists may be named with or without brackets."""

    start_time: UnixTime = Field(description="The first bucket has this time, in Unix seconds.")
    end_time: UnixTime | None = Field(
        None, description="Buckets begin before this time, in Unix seconds; today's is the last by default."
    )
    bucket_width: Literal["1d"] = Field("1d", description="A day; usage is not kept by the hour or minute.")
    page: Text | None = Field(None, description="The `next_page` of the previous page.")
    project_ids: list[Text] | None = Field(
        None, alias="project_ids[]", description="Only these projects; a key without `operator` sees its own."
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_names_without_brackets(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if unknown := {"api_key_ids", "user_ids"} & {name.removesuffix("[]") for name in values}:
            # Without the filter, the answer would hold more than was asked for.
            raise PydanticCustomError("unknown_filter", f"usage is not kept by key or user; leave {min(unknown)} out")
        accepted = dict(values)
        for name in {field.alias.removesuffix("[]") for field in cls.model_fields.values() if field.alias}:
            if name in accepted:
                value = accepted.pop(name)
                accepted[f"{name}[]"] = value if isinstance(value, list) else [value]
        return accepted

    def days(self, today: date, limit: int) -> tuple[list[date], date | None]:
        """Return the days of the page, and the first of the next page.

        Args:
            today: the current day in UTC.
            limit: the most days of a page.

        Raises:
            InvalidRequestError: ``page`` is no cursor.
        """
        if self.end_time is not None and self.end_time <= self.start_time:
            return [], None
        first = _day_of(self.start_time, today)
        end = today + _DAY if self.end_time is None else min(today, _day_of(self.end_time - 1, today)) + _DAY
        if self.page is not None:
            try:
                first = max(first, date.fromisoformat(self.page.removeprefix(_CURSOR_PREFIX)))
            except ValueError as error:
                raise InvalidRequestError(
                    "Invalid 'page': it is not a cursor. Use 'next_page' of the previous page.",
                    param="page",
                    code="invalid_value",
                ) from error
        left = max(0, (end - first).days)
        days = [first + index * _DAY for index in range(min(left, limit))]
        return days, first + limit * _DAY if left > limit else None


class UsageQuery(BucketQuery):
    """The query parameters of usage."""

    limit: int = Field(7, ge=1, le=31, description="The most buckets to return.")
    models: list[Text] | None = Field(None, alias="models[]", description="Only these models.")
    batch: bool | None = Field(None, description="False selects requests outside of batches, of which there are none.")
    group_by: list[Literal["project_id", "model", "batch"]] = Field(
        [], alias="group_by[]", description="A result for each of these; without it one for all."
    )


class CostsQuery(BucketQuery):
    """The query parameters of costs."""

    limit: int = Field(7, ge=1, le=180, description="The most buckets to return.")
    group_by: list[Literal["project_id", "line_item"]] = Field(
        [], alias="group_by[]", description="A result for each of these; without it one for each currency."
    )


def _day_of(unix_time: int, today: date) -> date:
    """Return the day of a time, at most a year after today: later times are no dates."""
    latest = int(datetime(today.year + 1, today.month, 1, tzinfo=UTC).timestamp())
    return datetime.fromtimestamp(max(0, min(unix_time, latest)), UTC).date()


@router.get(
    "/usage/completions",
    operation_id="listCompletionsUsage",
    summary="List usage by day",
    description="List tokens, requests and GPU seconds of the batches of all endpoints that ended on each day, in UTC. "
    "A key with the scope `operator` sees all projects, any other key its own.",
    responses=described({400: _INVALID}),
)
def list_completions_usage(
    backends: BackendsDependency, access: UsageAccess, wanted: Annotated[UsageQuery, Query()]
) -> BucketPage[CompletionsUsage]:
    """List usage by day.

    Raises:
        InvalidRequestError: ``page`` is no cursor.
    """
    days, following = wanted.days(datetime.now(UTC).date(), wanted.limit)
    rows: list[UsageRow] = []
    if days and wanted.batch is not False:
        rows = read_usage(
            backends.pool,
            days[0],
            days[-1] + _DAY,
            by_day=True,
            by_project="project_id" in wanted.group_by,
            by_model="model" in wanted.group_by,
            project_ids=_visible_projects(access, wanted.project_ids),
            models=wanted.models,
        )

    def result(row: UsageRow) -> CompletionsUsage:
        return CompletionsUsage(
            input_tokens=row.input_tokens,
            input_cached_tokens=row.cached_tokens,
            output_tokens=row.output_tokens,
            num_model_requests=row.completed,
            project_id=row.project_id,
            model=row.model,
            batch=True if "batch" in wanted.group_by else None,
            x_cloister=UsageExtension(
                gpu_seconds=round(row.gpu_seconds, 1),
                overhead_gpu_seconds=round(row.overhead_gpu_seconds, 1),
                batches=row.batches,
                failed_requests=row.failed,
            ),
        )

    return _page(BucketPage[CompletionsUsage], days, following, rows, lambda row: [result(row)])


@router.get(
    "/costs",
    operation_id="listCosts",
    summary="List costs by day",
    description="List the costs of the batches that ended on each day, in UTC, and of overhead. A key with the scope "
    "`operator` sees all projects, any other key its own.",
    responses=described({400: _INVALID}),
)
def list_costs(
    backends: BackendsDependency, access: UsageAccess, wanted: Annotated[CostsQuery, Query()]
) -> BucketPage[Costs]:
    """List costs by day.

    Raises:
        InvalidRequestError: ``page`` is no cursor.
    """
    days, following = wanted.days(datetime.now(UTC).date(), wanted.limit)
    rows: list[UsageRow] = []
    if days:
        rows = read_usage(
            backends.pool,
            days[0],
            days[-1] + _DAY,
            by_day=True,
            by_project="project_id" in wanted.group_by,
            by_model="line_item" in wanted.group_by,
            by_currency=True,
            project_ids=_visible_projects(access, wanted.project_ids),
        )

    def results(row: UsageRow) -> Iterator[Costs]:
        items = [
            (f"{row.model}, batches", row.cost, row.gpu_seconds),
            (f"{row.model}, overhead", row.overhead_cost, row.overhead_gpu_seconds),
        ]
        if "line_item" not in wanted.group_by:
            total_s = row.gpu_seconds + row.overhead_gpu_seconds
            items = [("", row.cost + row.overhead_cost, total_s)]
        for name, cost, gpu_seconds in items:
            if row.currency and gpu_seconds:
                yield Costs(
                    amount=Amount(value=round(float(cost), 6), currency=row.currency.lower()),
                    line_item=name or None,
                    project_id=row.project_id,
                    x_cloister=CostsExtension(gpu_seconds=round(gpu_seconds, 1)),
                )

    return _page(BucketPage[Costs], days, following, rows, results)


def _visible_projects(access: Access, wanted: Sequence[str] | None) -> list[str] | None:
    """Return the projects to read: all that are wanted for an operator, else at most the key's own."""
    if Scope.OPERATOR in access.scopes:
        return None if wanted is None else list(wanted)
    own = access.project.id
    return [own] if wanted is None or own in wanted else []


def _page(
    kind: type[BucketPage[T]],
    days: Sequence[date],
    following: date | None,
    rows: Sequence[UsageRow],
    results: Callable[[UsageRow], Iterator[T] | Sequence[T]],
) -> BucketPage[T]:
    """Return a page of buckets, among them those without results."""
    found: Mapping[date | None, list[UsageRow]] = {
        day: list(group) for day, group in groupby(rows, key=lambda row: row.day)
    }
    data = []
    for day in days:
        start = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp())
        listed = [result for row in found.get(day, ()) for result in results(row)]
        end = start + int(_DAY.total_seconds())
        data.append({"object": "bucket", "start_time": start, "end_time": end, "results": listed})
    cursor = None if following is None else f"{_CURSOR_PREFIX}{following.isoformat()}"
    return kind.model_validate({"object": "page", "data": data, "has_more": cursor is not None, "next_page": cursor})
