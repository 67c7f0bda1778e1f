"""How the process of a job ends. Ray tells the number in the job's message: ``… failed with exit code 4, last …``."""

from typing import Final

EXIT_FAILED: Final = 1
"""Another attempt may succeed; the last line of the log says why this one did not."""
EXIT_SUPERSEDED: Final = 3
"""The batch needs this attempt no more."""
EXIT_NO_MODEL: Final = 4
"""The object store has no such model, or one too large for its volume: every attempt would end the same way."""
