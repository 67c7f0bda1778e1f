"""A batch in the middle of its work, whenever one is asked for and however fast the machine is."""

from typing import Final

from tests.cluster.batches import chat_lines, done, submit, wait, wait_for_end
from tests.cluster.whole_stack import WholeStack

LINES: Final = 900
# Those that are not done yet when somebody asks: what he does then has its effect before the batch is over.
_LEFT: Final = 250
# A machine may be several times as slow as those where this takes one or two minutes.
_STARTED_S: Final = 500
ENDED_S: Final = 700


class RunningBatches:
    """One batch after another, each with the same lines, ``line-0`` and so on.

    Attributes:
        ids: of all of them, the running one last.
    """

    def __init__(self, stack: WholeStack) -> None:
        self._stack = stack
        self.ids: list[str] = []

    def begin(self) -> None:
        """Submits the first one, if that has not been done: its engine takes a while to start."""
        if not self.ids:
            self._submit()

    def running(self) -> str:
        """The id of one with some lines done and enough left: of the last one, or of a new one once that is over."""
        self.begin()
        while True:
            running = self.ids[-1]
            batch = wait(self._stack, running, lambda now: done(now) > 0, within_s=_STARTED_S, what="its first line")
            if LINES - done(batch) >= _LEFT:
                return running
            wait_for_end(self._stack, running, within_s=ENDED_S)
            self._submit()

    def _submit(self) -> None:
        self.ids.append(submit(self._stack, chat_lines(LINES, tokens=256, name="line")))
