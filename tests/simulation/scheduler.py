"""Who acts next, what the time is, and which calls fail: the seed decides all of it."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

BEGINNING: Final = datetime(2001, 1, 1, tzinfo=UTC)
# Actions inside of an action, at most.
_MOST_NESTED: Final = 1
_KEPT_TRACE: Final = 4_000


class RuleBrokenError(AssertionError):
    """A rule of the control plane was broken."""


class Killed(BaseException):
    """The process died in the middle of an action. Not an Exception, so that no code of the product handles it."""


@dataclass(slots=True, kw_only=True)
class Rates:
    """How likely things are to happen, from 0 to 1.

    Attributes:
        store: a call of the object store fails.
        launcher: a call of the launcher fails.
        commit: a transaction is aborted at its end, or its answer is lost.
        kill: the process of a reconciler dies at a call of a backend.
        between: others act before a transaction or a call of a backend.
        within: others act before a statement of a transaction.
        sleep: a job hangs before its next action.
        give_back: a job gives a segment back.
    """

    store: float = 0.0
    launcher: float = 0.0
    commit: float = 0.0
    kill: float = 0.0
    between: float = 0.0
    within: float = 0.0
    sleep: float = 0.0
    give_back: float = 0.0


@dataclass(slots=True)
class Scheduler:
    """Random numbers, virtual time, and interruptions of actions by other actions.

    Attributes:
        random: the only source of chance in a history.
        rates: of faults and interruptions.
        now: the time of the database and of the object store.
        skew: how far the Python clock of the acting process is ahead.
        meddle: lets other actors act.
        actions: the number of actions so far.
        may_die: whether the acting process is one that can be killed.
        trace: what happened.
    """

    random: random.Random
    rates: Rates = field(default_factory=Rates)
    now: datetime = BEGINNING
    skew: timedelta = timedelta()
    meddle: Callable[[], None] = lambda: None
    actions: int = 0
    may_die: bool = False
    is_meddling: bool = False
    trace: list[str] = field(default_factory=list)

    def happens(self, rate: float) -> bool:
        """Return True with a probability."""
        return rate > 0 and self.random.random() < rate

    def interrupt(self, rate: float) -> None:
        """Let others act here with a probability, and kill the acting process with another one."""
        if self.may_die and self.happens(self.rates.kill):
            self.note("killed")
            raise Killed
        if not self.is_meddling and self.happens(rate):
            self.is_meddling = True
            skew, may_die = self.skew, self.may_die
            self.note("{")
            try:
                self.meddle()
            finally:
                self.note("}")
                self.is_meddling, self.skew, self.may_die = False, skew, may_die

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += timedelta(microseconds=round(seconds * 1_000_000))

    def note(self, *words: object) -> None:
        """Add to the trace."""
        self.trace.append(" ".join(map(str, words)))

    def token_hex(self, nbytes: int) -> str:
        """See ``secrets.token_hex``."""
        return self.random.randbytes(nbytes).hex()

    def token_bytes(self, nbytes: int) -> bytes:
        """See ``secrets.token_bytes``."""
        return self.random.randbytes(nbytes)

    def token_urlsafe(self, nbytes: int) -> str:
        """See ``secrets.token_urlsafe``."""
        return self.token_hex(nbytes)
