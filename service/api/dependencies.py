"""Dependencies of the routes: the backends, and the access that a request's API key or token grants.

Each route takes the one of ``ReadAccess``, ``SubmitAccess``, ``AdminAccess``, ``OperatorAccess`` and ``UsageAccess``
that it requires.
"""

from collections.abc import Callable
from ipaddress import ip_address
from typing import Annotated, Final

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service.api.queue_positions import QueuePositions
from service.api.wrong_keys import WrongKeys, client_network
from service.api_keys import Access, authenticate, count_refused_login
from service.backends import Backends
from service.errors import InvalidRequestError
from service.oidc.access import access_of
from service.oidc.tokens import TokenError
from service.scopes import Scope

_DOTS_OF_TOKEN: Final = 2  # a JSON Web Token has three parts, an API key has none
_BEARER: Final = HTTPBearer(
    auto_error=False, scheme_name="apiKey", description="An API key of a project, `sk-cloister-…`."
)


def _backends(request: Request) -> Backends:
    backends: Backends = request.app.state.backends
    return backends


BackendsDependency = Annotated[Backends, Depends(_backends)]


def _queue_positions(request: Request) -> QueuePositions:
    queue_positions: QueuePositions = request.app.state.queue_positions
    return queue_positions


QueuePositionsDependency = Annotated[QueuePositions, Depends(_queue_positions)]


def _wrong_keys(request: Request) -> WrongKeys:
    wrong_keys: WrongKeys = request.app.state.wrong_keys
    return wrong_keys


def client_address(request: Request) -> str:
    """Return the IP address that the request came from; behind a trusted proxy, the client's. Empty if it is unknown.

    Wrong keys are counted by it, and the audit log records it.
    """
    host = request.client.host if request.client else ""
    try:
        # A proxy may forward anything, also in the zone of an IPv6 address.
        return str(ip_address(host.partition("%")[0]))
    except ValueError:
        return ""


def _access_with(*scopes: Scope) -> Callable[..., Access]:
    """Return the dependency that authenticates a request and requires one of some scopes."""

    def authenticated(
        request: Request,
        backends: BackendsDependency,
        wrong_keys: Annotated[WrongKeys, Depends(_wrong_keys)],
        credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
    ) -> Access:
        """Return the access that the request's API key, or token of the OpenID Connect issuer, grants.

        ``OpenAI-Organization`` is accepted but has no effect. ``OpenAI-Project`` selects one of a person's projects; an
        API key determines its project.

        Raises:
            InvalidRequestError: status 401, the request has no API key, or an invalid one; 403, the scope is missing;
                400 and 403, see ``service.oidc.access.access_of``.
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
        origin = {"client_address": address or None, "request_id": request.state.request_id}
        person, problem = None, "it is unknown, expired or revoked"
        is_token = backends.oidc is not None and key.count(".") == _DOTS_OF_TOKEN
        if backends.oidc is not None and is_token:
            try:
                person = backends.oidc.verify(key)
            except TokenError as error:
                problem = f"the token was refused because {error}"
        if person is None and (refusal := wrong_keys.refusal(address, key)):
            raise refusal
        access: Access | None = None
        if person is not None:
            project = request.headers.get("openai-project", "").strip()
            access = access_of(backends.pool, person, project, **origin)
        elif not is_token:
            access = authenticate(backends.pool, key, backends.max_key_lifetime, **origin)
        if access is None:
            wrong_keys.count(address)
            count_refused_login(backends.pool, key, network=client_network(address))
            raise InvalidRequestError(
                f"Incorrect API key provided: {problem}.", status_code=401, code="invalid_api_key"
            )
        request.state.project_id = access.project.id
        request.state.key_id = access.key_id
        if access.scopes.isdisjoint(scopes):
            count_refused_login(backends.pool, key, network=client_network(address), missing_scope=True)
            raise InvalidRequestError(
                f"You have insufficient permissions for this operation. Missing scopes: {' or '.join(scopes)}. "
                "Use a key with this scope; an operator creates one with `cloister keys create --scope`.",
                status_code=403,
                code="missing_scope",
            )
        return access

    return authenticated


ReadAccess = Annotated[Access, Depends(_access_with(Scope.READ))]
SubmitAccess = Annotated[Access, Depends(_access_with(Scope.SUBMIT))]
AdminAccess = Annotated[Access, Depends(_access_with(Scope.ADMIN))]
OperatorAccess = Annotated[Access, Depends(_access_with(Scope.OPERATOR))]
UsageAccess = Annotated[Access, Depends(_access_with(Scope.READ, Scope.OPERATOR))]
