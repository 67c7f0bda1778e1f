"""Exit codes of ``cloister``, and the error that carries one. docs/cli.md lists the codes."""

from enum import IntEnum
from typing import Final, Self

from service.errors import CloisterError


class ExitCode(IntEnum):
    """Exit codes of the commands that talk to the API, and of ``validate``."""

    OK = 0
    ERROR = 1
    USAGE = 2  # set by typer
    BATCH_FAILED = 3
    BATCH_EXPIRED = 4
    BATCH_CANCELLED = 5
    LINES_FAILED = 6
    FILE_INVALID = 7
    UNREACHABLE = 8
    INTERRUPTED = 130

    @classmethod
    def of_batch(cls, status: str, failed_lines: int) -> Self:
        """Return the code for a batch in a final state, by its status and its number of failed lines."""
        if status == "completed":
            return cls(cls.LINES_FAILED if failed_lines else cls.OK)
        return cls({"failed": cls.BATCH_FAILED, "expired": cls.BATCH_EXPIRED, "cancelled": cls.BATCH_CANCELLED}[status])


MEANINGS: Final = {
    ExitCode.OK: "success; if the command waited for a batch, it is completed and no line failed",
    ExitCode.ERROR: "an error, described on stderr: the server refused, a file cannot be read or written, …",
    ExitCode.USAGE: "wrong usage of the command line",
    ExitCode.BATCH_FAILED: "the batch failed",
    ExitCode.BATCH_EXPIRED: "the batch expired",
    ExitCode.BATCH_CANCELLED: "the batch was cancelled",
    ExitCode.LINES_FAILED: "the batch is completed, and some of its lines failed",
    ExitCode.FILE_INVALID: "the input file is invalid; nothing was uploaded",
    ExitCode.UNREACHABLE: "the server is unreachable or fails; try again later",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C); a batch that was created continues",
}

EPILOG: Final = (
    "Exit codes: 0 success, 1 error, 2 wrong usage, 3 batch failed, 4 batch expired, 5 batch cancelled, "
    "6 lines failed, 7 invalid file, 8 server unreachable, 130 interrupted."
)


class CommandError(CloisterError):
    """A command cannot continue.

    Args:
        message: what is wrong and what to do.
        exit_code: the exit code of the process.
    """

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.ERROR) -> None:
        super().__init__(message)
        self.exit_code = exit_code
