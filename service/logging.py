"""Logging: one JSON object per line on standard output. Prompts, completions and API keys are never logged."""

import logging
import sys

import structlog


def configure_logging(level: str) -> None:
    """Write structlog events and standard library records to standard output as JSON.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
    """

    def drop_colour(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        # uvicorn adds a coloured copy of the message for terminals.
        event.pop("color_message", None)
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
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # A line for each poll of Ray would hide the transitions.
    logging.getLogger("httpx").setLevel(max(logging.WARNING, root.level))
