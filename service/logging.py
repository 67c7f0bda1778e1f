"""Logging: one JSON object per line on standard output. Prompts, completions and API keys are never logged."""

import logging
import sys
import traceback

import psycopg
import structlog

from ray_job.contract.parts import PartError
from ray_job.contract.plans import PlanError
from service.errors import CloisterError

_MAX_CAUSES = 10
# Their messages quote no content.
_SAFE_ERRORS = (CloisterError, OSError, PartError, PlanError, psycopg.OperationalError)


def error_text(error: BaseException) -> str:
    """Return what may be logged about an error: its message if that quotes no content for sure, else its type."""
    return str(error).strip() if isinstance(error, _SAFE_ERRORS) else type(error).__name__


def describe_exception(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Replace the exception of an event by the types of it and its causes, and the places of its traceback.

    Their messages may quote content.
    """
    given = event.pop("exc_info", None)
    error = given if isinstance(given, BaseException) else given[1] if isinstance(given, tuple) else sys.exc_info()[1]
    if not given or error is None:
        return event
    types: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(types) < _MAX_CAUSES:
        types.append(type(cause).__qualname__)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    event["exception"] = types
    event["frames"] = [
        f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)
    ]
    return event


def configure_logging(level: str) -> None:
    """Write structlog events and standard library records to standard output as JSON.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
    """

    def drop_colour(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        # uvicorn adds a coloured copy of the message for terminals.
        event.pop("color_message", None)
        if event.get("logger") == "asyncio":  # its further lines show the error of a task
            event["event"] = str(event["event"]).partition("\n")[0]
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(), drop_colour],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                describe_exception,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # A line for each poll of Ray would hide the transitions.
    logging.getLogger("httpx").setLevel(max(logging.WARNING, root.level))
