"""The errors of ``cloister local``; each message is shown to the user as it is.

CloisterError
└── LocalError             cannot start, or cannot go on
    └── ChildFailedError   a child ended while the stack started
"""

from service.errors import CloisterError


class LocalError(CloisterError):
    """``cloister local`` cannot start; the message says why and what to do."""


class ChildFailedError(LocalError):
    """A child ended while the stack started; the message holds the end of its log."""
