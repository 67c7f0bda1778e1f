"""Exit codes of a job's process. Ray reports the code in the job's message: ``… failed with exit code 4, last …``."""

from typing import Final

EXIT_FAILED: Final = 1
"""The job failed, and another attempt may succeed. The last line of the log is the reason."""
EXIT_SUPERSEDED: Final = 3
"""The batch no longer needs this attempt."""
EXIT_NO_MODEL: Final = 4
"""The object store has no such model, or one too large for its volume. Every further attempt would end alike."""
