"""Dependencies of the routes: the backends, and the access that a request's API key grants.

Each route takes the one of ``ReadAccess``, ``SubmitAccess`` and ``AdminAccess`` that it requires.
"""

from collections.abc import Callable
from typing import Annotated, Final

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service.api.wrong_keys import WrongKeys, client_network
from service.api_keys import Access, Scope, authenticate, count_refused_login
from service.backends import Backends
from service.errors import InvalidRequestError

_BEARER: Final = HTTPBearer(
    auto_error=False, scheme_name="apiKey", description="An API key of a project, `sk-cloister-…`."
)


def _backends(request: Request) -> Backends:
    backends: Backends = request.app.state.backends
    return backends


BackendsDependency = Annotated[Backends, Depends(_backends)]


def _wrong_keys(request: Request) -> WrongKeys:
    wrong_keys: WrongKeys = request.app.state.wrong_keys
    return wrong_keys


def client_address(request: Request) -> str:
    """Return the IP address that the request came from; behind an ingress, that of the ingress. Empty for a socket.

    Wrong keys are counted by it, and the audit log records it.
    """
    return request.client.host if request.client else ""


def _access_with(scope: Scope) -> Callable[..., Access]:
    """Return the dependency that authenticates a request and requires a scope of its key."""

    def authenticated(
        request: Request,
        backends: BackendsDependency,
        wrong_keys: Annotated[WrongKeys, Depends(_wrong_keys)],
        credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
    ) -> Access:
        """Return the access that the request's bearer token grants.

        ``OpenAI-Organization`` and ``OpenAI-Project`` are accepted but have no effect: the key determines the project.

        Raises:
            InvalidRequestError: status 401, the request has no API key, or an invalid one; 403, the scope is missing.
            RateLimitError: the client's address has sent many wrong keys, and this is another one.
        """
        key = credentials.credentials.strip() if credentials else ""
        if not key:
            raise InvalidRequestError(
                "You didn't provide an API key. Send it in the Authorization header as a bearer token: "
                "'Authorization: Bearer YOUR_KEY'.",
                status_code=401,
            )
        address = client_address(request)
        if refusal := wrong_keys.refusal(address, key):
            raise refusal
        access = authenticate(backends.pool, key, client_address=address or None, request_id=request.state.request_id)
        if access is None:
            wrong_keys.count(address)
            count_refused_login(backends.pool, key, network=client_network(address))
            raise InvalidRequestError(
                "Incorrect API key provided: it is unknown, expired or revoked.",
                status_code=401,
                code="invalid_api_key",
            )
        request.state.project_id = access.project.id
        request.state.key_id = access.key_id
        if scope not in access.scopes:
            count_refused_login(backends.pool, key, network=client_network(address), missing_scope=True)
            raise InvalidRequestError(
                f"You have insufficient permissions for this operation. Missing scopes: {scope}. "
                "Use a key with this scope; an operator creates one with `cloister keys create --scope`.",
                status_code=403,
                code="missing_scope",
            )
        return access

    return authenticated


ReadAccess = Annotated[Access, Depends(_access_with(Scope.READ))]
SubmitAccess = Annotated[Access, Depends(_access_with(Scope.SUBMIT))]
AdminAccess = Annotated[Access, Depends(_access_with(Scope.ADMIN))]
