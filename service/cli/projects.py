"""``cloister projects``: who owns keys, files and batches of a stack, and how much of it each may take."""

from typing import Annotated, Any, Final

import typer

from service.cli.database import DEFAULT_DATA_DIR, DataDir, stack_database
from service.projects import ProjectReport, archive_project, create_project, find_project, list_projects, set_project
from service.quotas import Limits

app = typer.Typer(help="Projects of a stack and their limits.", no_args_is_help=True)

_DAY_S: Final = 24 * 3600
_MAX_LIMITS: Final = {
    "max_batches_in_progress": (1 << 31) - 1,
    "max_enqueued_requests": (1 << 63) - 1,
    "max_enqueued_tokens": (1 << 63) - 1,
    "max_stored_bytes": (1 << 63) - 1,
}
_MAX_RETENTION_DAYS: Final = 3650
_MAX_DIGITS: Final = 19

MaxBatches = Annotated[str | None, typer.Option(metavar="N", help="Batches that have not ended, at a time.")]
MaxRequests = Annotated[str | None, typer.Option(metavar="N", help="Requests of batches that have not ended.")]
MaxTokens = Annotated[
    str | None, typer.Option(metavar="N", help="Input tokens of batches that have not ended, estimated: bytes / 4.")
]
MaxBytes = Annotated[str | None, typer.Option(metavar="N", help="Bytes of all files, results too.")]
RetentionDays = Annotated[
    str | None,
    typer.Option(metavar="DAYS", help="How long files without an expiry of their own and ended batches are kept."),
]


def parse_changes(options: dict[str, str | None]) -> dict[str, int | None]:
    """The columns of ``projects`` to change: options that were given, with None for the word ``none``.

    Raises:
        typer.BadParameter: a value is neither a whole number in range nor ``none``.
    """
    changes: dict[str, int | None] = {}
    for name, text in options.items():
        if text is None:
            continue
        days = name == "retention_days"
        low, high = (1, _MAX_RETENTION_DAYS) if days else (0, _MAX_LIMITS[name])
        if text != "none" and not (
            text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS and low <= int(text) <= high
        ):
            raise typer.BadParameter(
                f"{text!r} is neither a whole number from {low} to {high} nor none",
                param_hint=f"--{name.replace('_', '-')}",
            )
        number = None if text == "none" else int(text)
        changes["retention_s" if days else name] = number * _DAY_S if days and number is not None else number
    return changes


@app.command("create")
def create(
    name: str,
    *,
    max_batches_in_progress: MaxBatches = None,
    max_enqueued_requests: MaxRequests = None,
    max_enqueued_tokens: MaxTokens = None,
    max_stored_bytes: MaxBytes = None,
    retention_days: RetentionDays = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Make a project and show its id. What is not limited here is not limited at all."""
    settings: dict[str, Any] = parse_changes(
        {
            "max_batches_in_progress": max_batches_in_progress,
            "max_enqueued_requests": max_enqueued_requests,
            "max_enqueued_tokens": max_enqueued_tokens,
            "max_stored_bytes": max_stored_bytes,
            "retention_days": retention_days,
        }
    )
    retention_s = settings.pop("retention_s", None)
    with stack_database(data_dir) as pool:
        print(create_project(pool, name, limits=Limits(**settings), retention_s=retention_s).id)


def _told(used: int, limit: int | None) -> str:
    return f"{used:,} of {'no limit' if limit is None else f'{limit:,}'}"


def _lines(project: ProjectReport) -> list[str]:
    state = (
        f"archived {project.archived_at:%Y-%m-%d}" if project.archived_at else f"since {project.created_at:%Y-%m-%d}"
    )
    kept = "the stack's default" if project.retention_s is None else f"{project.retention_s / _DAY_S:g} days"
    return [
        f"{project.name}  {project.id}  {state}",
        f"  batches in progress  {_told(project.use.batches, project.limits.max_batches_in_progress)}",
        f"  enqueued requests    {_told(project.use.requests, project.limits.max_enqueued_requests)}",
        f"  enqueued tokens      {_told(project.use.tokens, project.limits.max_enqueued_tokens)}",
        f"  stored bytes         {_told(project.use.stored_bytes, project.limits.max_stored_bytes)}",
        f"  retention            {kept}",
    ]


@app.command("list")
def show(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Show every project, its limits and what it uses of them now."""
    with stack_database(data_dir) as pool:
        for project in list_projects(pool):
            print("\n".join(_lines(project)))


@app.command("set")
def change(
    name: str,
    *,
    max_batches_in_progress: MaxBatches = None,
    max_enqueued_requests: MaxRequests = None,
    max_enqueued_tokens: MaxTokens = None,
    max_stored_bytes: MaxBytes = None,
    retention_days: RetentionDays = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Change limits; `none` takes one away. What is enqueued or stored already stays."""
    changes = parse_changes(
        {
            "max_batches_in_progress": max_batches_in_progress,
            "max_enqueued_requests": max_enqueued_requests,
            "max_enqueued_tokens": max_enqueued_tokens,
            "max_stored_bytes": max_stored_bytes,
            "retention_days": retention_days,
        }
    )
    if not changes:
        raise typer.BadParameter("give at least one limit to change; see `cloister projects set --help`")
    with stack_database(data_dir) as pool:
        set_project(pool, find_project(pool, name), changes)
    print(f"changed {name}")


@app.command("archive")
def archive(name: str, data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Refuse a project's keys from now on. Its batches run on; its files go when their time is over."""
    with stack_database(data_dir) as pool:
        archive_project(pool, find_project(pool, name))
    print(f"archived {name}")
