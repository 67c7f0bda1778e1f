"""What a command's exit code says. Stands in docs/cli.md too."""

from enum import IntEnum
from typing import Final

from service.errors import CloisterError


class ExitCode(IntEnum):
    """Exit codes of the commands that talk to the API, and of ``validate``."""

    OK = 0
    ERROR = 1
    USAGE = 2  # typer's own
    BATCH_FAILED = 3
    BATCH_EXPIRED = 4
    BATCH_CANCELLED = 5
    LINES_FAILED = 6
    FILE_INVALID = 7
    UNREACHABLE = 8
    INTERRUPTED = 130


MEANINGS: Final = {
    ExitCode.OK: "done; a batch that was waited for is completed, and no line of it failed",
    ExitCode.ERROR: "an error, told on stderr: the server refused, a file cannot be read or written, …",
    ExitCode.USAGE: "the command line is wrong",
    ExitCode.BATCH_FAILED: "the batch failed",
    ExitCode.BATCH_EXPIRED: "the batch expired",
    ExitCode.BATCH_CANCELLED: "the batch was cancelled",
    ExitCode.LINES_FAILED: "the batch is completed, and some of its lines failed",
    ExitCode.FILE_INVALID: "the input file is not valid; nothing was uploaded",
    ExitCode.UNREACHABLE: "the server cannot be reached or does not work; try again later",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C); a batch that was created goes on",
}

EPILOG: Final = "Exit codes: " + "; ".join(f"{code.value} {meaning}" for code, meaning in MEANINGS.items()) + "."


class CommandError(CloisterError):
    """A command cannot go on; the message says what to do, the code what to end with."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.ERROR) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def outcome(status: str, failed_lines: int) -> ExitCode:
    """How a batch in a final state has ended."""
    if status == "completed":
        return ExitCode.LINES_FAILED if failed_lines else ExitCode.OK
    return {
        "failed": ExitCode.BATCH_FAILED,
        "expired": ExitCode.BATCH_EXPIRED,
        "cancelled": ExitCode.BATCH_CANCELLED,
    }[status]
