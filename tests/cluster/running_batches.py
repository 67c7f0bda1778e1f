"""Batches that tests can interrupt: one that is being worked on, however fast the machine is."""

from typing import Final

from tests.cluster.batches import chat_lines, done, submit, wait, wait_for_end
from tests.cluster.whole_stack import WholeStack

# On a slow machine the first batch lasts for all tests; on a fast one others follow.
_FIRST: Final = 1_450
_NEXT: Final = 600
# Lines that must be open when a test asks for a batch, so that its fault happens before the batch is over.
_LEFT: Final = 200
# A slow machine takes several times the usual one or two minutes.
_STARTED_S: Final = 500
ENDED_S: Final = 700


class RunningBatches:
    """Batches one after another, with the lines ``line-0``, ``line-1`` and so on.

    Attributes:
        lines: number of lines of each batch by id, in the order of creation.
    """

    def __init__(self, stack: WholeStack) -> None:
        self._stack = stack
        self.lines: dict[str, int] = {}

    def begin(self) -> None:
        """Submit the first batch unless it exists; its engine takes a while to start."""
        if not self.lines:
            self._submit(_FIRST)

    def running(self) -> str:
        """Return the id of a batch with some lines done and enough left: the last one, or a new one."""
        self.begin()
        while True:
            running, lines = list(self.lines.items())[-1]
            batch = wait(self._stack, running, lambda now: done(now) > 0, within_s=_STARTED_S, what="its first line")
            if lines - done(batch) >= _LEFT:
                return running
            wait_for_end(self._stack, running, within_s=ENDED_S)
            self._submit(_NEXT)

    def _submit(self, lines: int) -> None:
        self.lines[submit(self._stack, chat_lines(lines, tokens=256, name="line"))] = lines
