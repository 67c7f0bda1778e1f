"""Finds what a request's API key gives access to, and refuses what the key has no scope for.

Each route asks for the one of ``ReadAccess``, ``SubmitAccess`` and ``AdminAccess`` that it needs.
"""

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request

from service.api.parts import PartsDependency
from service.api_keys import Access, Scope, authenticate
from service.errors import AuthenticationError, ScopeError


def authenticated(request: Request, parts: PartsDependency) -> Access:
    """What the request's bearer token gives access to.

    ``OpenAI-Organization`` and ``OpenAI-Project`` are accepted and change nothing: the key says the project.

    Raises:
        AuthenticationError: no key, or none that is valid.
    """
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise AuthenticationError(
            "You didn't provide an API key. Send it in the Authorization header as a bearer token: "
            "'Authorization: Bearer YOUR_KEY'."
        )
    access = authenticate(parts.pool, key)
    if access is None:
        raise AuthenticationError(
            "Incorrect API key provided: it is unknown here, expired or revoked.", code="invalid_api_key"
        )
    request.state.project_id = access.project.id
    request.state.key_id = access.key_id
    return access


def _needing(scope: Scope) -> Callable[[Access], Access]:
    def with_scope(access: Annotated[Access, Depends(authenticated)]) -> Access:
        if scope not in access.scopes:
            raise ScopeError(
                f"You have insufficient permissions for this operation. Missing scopes: {scope}. "
                "Use a key that has it; an operator makes one with `cloister keys create --scope`.",
                code="missing_scope",
            )
        return access

    return with_scope


ReadAccess = Annotated[Access, Depends(_needing(Scope.READ))]
SubmitAccess = Annotated[Access, Depends(_needing(Scope.SUBMIT))]
AdminAccess = Annotated[Access, Depends(_needing(Scope.ADMIN))]
