"""Finds the project that a request's API key belongs to."""

from typing import Annotated

from fastapi import Depends, Request

from service.api.parts import PartsDependency
from service.api_keys import Project, authenticate
from service.errors import AuthenticationError


def authenticated_project(request: Request, parts: PartsDependency) -> Project:
    """The project of the request's bearer token.

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
    project = authenticate(parts.pool, key)
    if project is None:
        raise AuthenticationError(
            "Incorrect API key provided: it is unknown here, expired or revoked.", code="invalid_api_key"
        )
    request.state.project_id = project.id
    return project


ProjectDependency = Annotated[Project, Depends(authenticated_project)]
