"""``cloister projects``: the projects of a stack and their limits."""

import time
from datetime import UTC
from typing import Annotated, Any, Final

import typer

from service.cli.database import Operator, operator_actor, stack_database
from service.cli.options import DEFAULT_DATA_DIR, DataDir
from service.projects import (
    archive_project,
    create_project,
    erase_project,
    erasure_progress,
    find_project,
    list_projects,
    set_project,
)
from service.quotas import Limits

projects = typer.Typer(help="Manage the projects of a stack and their limits.", no_args_is_help=True)

_DAY_S: Final = 24 * 3600
_PROGRESS_INTERVAL_S: Final = 2.0
_MAX_DIGITS: Final = 19
# The largest value of each column of the table projects.
_MAX_LIMITS: Final = {
    "max_batches_in_progress": (1 << 31) - 1,
    "max_enqueued_requests": (1 << 63) - 1,
    "max_enqueued_tokens": (1 << 63) - 1,
    "max_stored_bytes": (1 << 63) - 1,
    "retention_days": 3650,
}

MaxBatches = Annotated[str | None, typer.Option(metavar="N", help="Limit for open batches.")]
MaxRequests = Annotated[str | None, typer.Option(metavar="N", help="Limit for requests of open batches.")]
MaxTokens = Annotated[
    str | None,
    typer.Option(metavar="N", help="Limit for input tokens of open batches, estimated as bytes / 4."),
]
MaxBytes = Annotated[str | None, typer.Option(metavar="N", help="Limit for the bytes of all files, including results.")]
RetentionDays = Annotated[
    str | None,
    typer.Option(metavar="DAYS", help="The most days to keep files and ended batches."),
]


def parse_limits(options: dict[str, str | None]) -> dict[str, int | None]:
    """Return the columns of the table ``projects`` to change.

    Args:
        options: a value for each option, by name: a whole number, ``none`` for no limit, or None to leave it as it is.

    Raises:
        typer.BadParameter: a value is neither a whole number in range nor ``none``.
    """
    changes: dict[str, int | None] = {}
    for name, text in options.items():
        if text is None:
            continue
        is_retention = name == "retention_days"
        low, high = int(is_retention), _MAX_LIMITS[name]
        is_number = text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
        if text != "none" and not (is_number and low <= int(text) <= high):
            raise typer.BadParameter(
                f"{text!r} is neither a whole number from {low} to {high} nor none",
                param_hint=f"--{name.replace('_', '-')}",
            )
        number = None if text == "none" else int(text)
        if is_retention:
            changes["retention_s"] = None if number is None else number * _DAY_S
        else:
            changes[name] = number
    return changes


@projects.command("create")
def create(
    name: Annotated[str, typer.Argument(help="A name for the project.")],
    *,
    max_batches_in_progress: MaxBatches = None,
    max_enqueued_requests: MaxRequests = None,
    max_enqueued_tokens: MaxTokens = None,
    max_stored_bytes: MaxBytes = None,
    retention_days: RetentionDays = None,
    operator: Operator = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Create a project and print its id. By default a project has no limits."""
    limits: dict[str, Any] = parse_limits(
        {
            "max_batches_in_progress": max_batches_in_progress,
            "max_enqueued_requests": max_enqueued_requests,
            "max_enqueued_tokens": max_enqueued_tokens,
            "max_stored_bytes": max_stored_bytes,
            "retention_days": retention_days,
        }
    )
    retention_s = limits.pop("retention_s", None)
    with stack_database(data_dir) as pool:
        actor = operator_actor(operator)
        print(create_project(pool, name, limits=Limits(**limits), retention_s=retention_s, actor=actor).id)


@projects.command("list")
def show(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """List the projects with their limits and current use."""
    with stack_database(data_dir) as pool:
        for each in list_projects(pool):
            state = f"since {each.created_at:%Y-%m-%d}"
            if each.archived_at:
                state = f"archived {each.archived_at:%Y-%m-%d}"
            print(f"{each.name}  {each.id}  {state}")
            for label, used, limit in (
                ("batches in progress", each.use.batches, each.limits.max_batches_in_progress),
                ("enqueued requests", each.use.requests, each.limits.max_enqueued_requests),
                ("enqueued tokens", each.use.tokens, each.limits.max_enqueued_tokens),
                ("stored bytes", each.use.stored_bytes, each.limits.max_stored_bytes),
            ):
                print(f"  {label:<19}  {used:,} of {'no limit' if limit is None else f'{limit:,}'}")
            days = None if each.retention_s is None else each.retention_s / _DAY_S
            print(f"  {'retention':<19}  {'default of the stack' if days is None else f'{days:g} days'}")


@projects.command("set")
def change(
    name: Annotated[str, typer.Argument(help="The project, by name or id.")],
    *,
    max_batches_in_progress: MaxBatches = None,
    max_enqueued_requests: MaxRequests = None,
    max_enqueued_tokens: MaxTokens = None,
    max_stored_bytes: MaxBytes = None,
    retention_days: RetentionDays = None,
    operator: Operator = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Change limits; `none` removes a limit. Existing batches and files stay."""
    changes = parse_limits(
        {
            "max_batches_in_progress": max_batches_in_progress,
            "max_enqueued_requests": max_enqueued_requests,
            "max_enqueued_tokens": max_enqueued_tokens,
            "max_stored_bytes": max_stored_bytes,
            "retention_days": retention_days,
        }
    )
    if not changes:
        raise typer.BadParameter("give at least one limit; `cloister projects set --help` lists them")
    with stack_database(data_dir) as pool:
        set_project(pool, find_project(pool, name), changes, actor=operator_actor(operator))
    print(f"changed {name}")


@projects.command("archive")
def archive(
    name: Annotated[str, typer.Argument(help="The project, by name or id.")],
    *,
    operator: Operator = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Archive a project. Its keys are refused; its batches continue; its files are deleted when they expire."""
    with stack_database(data_dir) as pool:
        archive_project(pool, find_project(pool, name), actor=operator_actor(operator))
    print(f"archived {name}")


@projects.command("delete")
def delete(
    name: Annotated[str, typer.Argument(help="The project, by name or id.")],
    *,
    erase: Annotated[bool, typer.Option("--erase", help="Confirm that everything in it is deleted for ever.")] = False,
    wait: Annotated[bool, typer.Option(help="Show the progress until the project is gone.")] = True,
    operator: Operator = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Erase a project: batches, files, results, webhooks, keys. Audit log and receipts stay.

    The reconciler does it in the background, also after an interruption. It takes up to an hour
    longer than the project's jobs, whose URLs must expire first. Run the command again with the
    id of the project to see the progress.
    """
    if not erase:
        raise typer.BadParameter(
            "give --erase to delete everything in the project; `cloister projects archive` refuses its keys only"
        )
    with stack_database(data_dir) as pool:
        project = find_project(pool, name)
        is_new = erase_project(pool, project, actor=operator_actor(operator))
        print(f"{'erasing' if is_new else 'still erasing'} {project.id}", flush=True)
        shown = ""
        while wait and (left := erasure_progress(pool, project)) is not None:
            text = (
                f"left: {left.open_batches} open batches, {left.batches} batches, {left.files} files, {left.jobs} jobs"
            )
            if left.urls_expire_at:
                text += f"; URLs of jobs expire at {left.urls_expire_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
            if text != shown:
                print(text, flush=True)
            shown = text
            time.sleep(_PROGRESS_INTERVAL_S)
    if wait:
        print(f"erased {project.id}")
