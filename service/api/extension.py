"""The extension ``x_cloister`` of a batch: its place in the queue, its rate and its forecast. Pure."""

from datetime import datetime, timedelta
from typing import Final, Literal, Self

from service.api.schemas import Answer, BatchObject, unix_seconds
from service.db.rows import BatchProgressRow, RetrievedBatchRow
from service.transitions import BatchStatus

# Jobs report every few seconds; a rate without a report for this long predicts nothing.
RATE_IS_FRESH_FOR: Final = timedelta(seconds=60)
# Shares of the remaining time, or of the completion window if no rate is known.
_LOW_SHARE: Final = 0.5
_MEDIUM_SHARE_LEFT: Final = 0.1
# The states in which lines may still run.
RUNNABLE: Final = frozenset({BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS})


def rate_and_eta(row: BatchProgressRow, now: datetime) -> tuple[float | None, float | None]:
    """Return the rows per second of a running batch, and the seconds until every line has a result at this rate.

    The rate is None if its last report is too old or missing, the seconds are None without a rate above 0.
    """
    is_fresh = row.progress_at is not None and now - row.progress_at <= RATE_IS_FRESH_FOR
    rate = row.rows_per_s if row.status == BatchStatus.IN_PROGRESS and is_fresh else None
    rows_left = max(0, row.total - row.completed - row.failed)
    return rate, rows_left / rate if rate else None


class BatchEstimate(Answer):
    """Needs of a batch, estimated when its input file was accepted. An unknown value is null."""

    input_tokens: int | None
    """Tokens of all prompts, by the model's own tokenizer. Exact if every line was counted."""
    output_tokens: int | None
    """Expected tokens of all answers: the tokens that the requests allow, times the share that earlier batches of the
    model generated of what they were allowed."""
    duration_s: float | None
    """Seconds from the creation to the completion if no other batch is ahead, at the rate of earlier batches."""
    gpu_seconds: float | None
    """GPUs multiplied by the seconds for which the job reserves them; 0 for a model on CPUs."""
    sampled_lines: int
    """Lines whose tokens were counted; those of a large file are a sample."""


class Amount(Answer):
    """An amount of money."""

    value: float
    currency: str
    """Its ISO 4217 code in lower case, e.g. `usd`."""


class Extension(Answer):
    """cloister's fields of a batch beyond OpenAI's object. An unknown value is null."""

    priority: int
    """Of the batches of a project, those with the highest priority run first."""
    paused_at: int | None
    """When the batch was paused, in Unix seconds; null unless it is paused."""
    queue_position: int | None
    """Of the job that will run the batch: 1 is launched next. Null unless that job waits for its launch."""
    rate_rows_per_second: float | None
    """Finished requests per second, over about the last minute."""
    eta_seconds: int | None
    """Seconds until every request has a result, at this rate."""
    estimated_completion_at: int | None
    """The same as a time, in Unix seconds."""
    deadline_risk: Literal["low", "medium", "high"] | None
    """The risk of missing `expires_at`. With a rate: `low` while the ETA takes at most half of the remaining time,
    `medium` while it fits, else `high`. Without a rate: by the remaining share of the completion window, more than a
    half and more than a tenth. Null unless the batch is validating or in progress."""
    gpu_seconds: float
    """GPUs multiplied by the seconds for which jobs reserved them, split between the batches of a job by tokens."""
    cost: Amount | None
    """Cost of these seconds; null while none of them had a price."""
    input_tokens: int
    """Tokens of the prompts that were answered so far."""
    cached_tokens: int
    """How many of them engines found in their prefix cache, and did not compute again."""
    output_tokens: int
    """Tokens that were generated so far."""
    enqueued_tokens: int
    """Estimated tokens of the input, which count towards the limit of the project."""
    job_id: str | None
    """The job that runs the batch; null before it is created, after it ended, and while the batch is paused."""
    failed_jobs: int
    """Jobs that failed in a row without a new result."""
    last_job_message: str | None
    """Why the last failed job failed."""
    estimate: BatchEstimate | None
    """Tokens, duration and GPU seconds; null until the input file is accepted."""

    @classmethod
    def from_row(cls, row: RetrievedBatchRow, *, queue_position: int | None) -> Self:
        """Return the extension of a batch at the database's time, which also wrote the times it is compared with."""
        now = row.now
        rate, eta = rate_and_eta(row, now)
        left_s = (row.expires_at - now).total_seconds()
        window_s = (row.expires_at - row.created_at).total_seconds()
        is_low, is_medium = left_s > window_s * _LOW_SHARE, left_s > window_s * _MEDIUM_SHARE_LEFT
        if eta is not None:
            is_low, is_medium = eta <= left_s * _LOW_SHARE, eta <= left_s
        risk: Literal["low", "medium", "high"] = "low" if is_low else "medium" if is_medium else "high"
        return cls(
            priority=row.priority,
            paused_at=unix_seconds(row.paused_at) if row.status in RUNNABLE else None,
            queue_position=queue_position,
            rate_rows_per_second=None if rate is None else round(rate, 3),
            eta_seconds=None if eta is None else round(eta),
            estimated_completion_at=None if eta is None else int((now + timedelta(seconds=eta)).timestamp()),
            deadline_risk=risk if row.status in RUNNABLE else None,
            gpu_seconds=round(row.gpu_seconds, 1),
            cost=None
            if row.cost is None or row.currency is None
            else Amount(value=round(float(row.cost), 6), currency=row.currency.lower()),
            input_tokens=row.input_tokens,
            cached_tokens=row.cached_tokens,
            output_tokens=row.output_tokens,
            enqueued_tokens=row.enqueued_tokens,
            job_id=row.job_id,
            failed_jobs=row.failed_jobs,
            last_job_message=row.last_job_message,
            estimate=None
            if row.estimate is None
            else BatchEstimate(**{name: row.estimate[name] for name in BatchEstimate.model_fields}),
        )


class RetrievedBatch(BatchObject):
    """OpenAI's Batch object with cloister's extension."""

    x_cloister: Extension
    """Queue, rate and forecast."""
