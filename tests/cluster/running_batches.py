"""A batch in the middle of its work, whenever one is asked for and however fast the machine is."""

from typing import Final

from tests.cluster.batches import chat_lines, done, submit, wait, wait_for_end
from tests.cluster.whole_stack import WholeStack

# The first lasts for all that the tests do on a slow machine; on a fast one others follow.
_FIRST: Final = 1_450
_NEXT: Final = 600
# Lines that are not done yet when somebody asks: what he does then has its effect before the batch is over.
_LEFT: Final = 200
# A machine may be several times as slow as those where this takes one or two minutes.
_STARTED_S: Final = 500
ENDED_S: Final = 700


class RunningBatches:
    """One batch after another, with the lines ``line-0``, ``line-1`` and so on.

    Attributes:
        lines: how many each has, by its id; the running one is the last.
    """

    def __init__(self, stack: WholeStack) -> None:
        self._stack = stack
        self.lines: dict[str, int] = {}

    def begin(self) -> None:
        """Submits the first one, if that has not been done: its engine takes a while to start."""
        if not self.lines:
            self._submit(_FIRST)

    def running(self) -> str:
        """The id of one with some lines done and enough left: of the last one, or of a new one once that is over."""
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
