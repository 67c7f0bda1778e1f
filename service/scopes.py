"""Scopes: what an API key, or a group of people, may do in a project."""

from enum import StrEnum
from typing import Final


class Scope(StrEnum):
    """A permission of a key.

    ``read`` lists and retrieves; ``submit`` uploads, creates, cancels and deletes; ``admin`` manages webhook endpoints
    and reads the audit log; ``operator`` reads usage, costs and capacity of the whole stack.
    """

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"
    OPERATOR = "operator"


DEFAULT_SCOPES: Final = (Scope.READ, Scope.SUBMIT)
