"""The error of ``cloister local``. Its message is printed for the user as it is."""

from service.errors import CloisterError


class LocalError(CloisterError):
    """``cloister local`` cannot start or continue. The message has the reason and the remedy."""
