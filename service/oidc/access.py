"""The project that a person acts for."""

from service.api_keys import PERSON_PREFIX, Access
from service.audit.log import Actor
from service.db import Pool
from service.db.rows import fetch_all
from service.errors import InvalidRequestError
from service.oidc.tokens import Person
from service.projects import Project


def access_of(
    pool: Pool,
    person: Person,
    project: str,
    *,
    client_address: str | None = None,
    request_id: str | None = None,
) -> Access:
    """Return the access of a person to one of their projects.

    Args:
        pool: the database.
        person: the holder of a valid token.
        project: id or name of the project, from the header ``OpenAI-Project``; empty for the only one.
        client_address: IP address of the client, for the audit log.
        request_id: id of the request, for the audit log.

    Raises:
        InvalidRequestError: status 403, the person has no such project; 400, they have several and name none.
    """
    with pool.connection() as connection:
        granted = fetch_all(connection, Project, "open_projects", {"names": list(person.scopes)})
    chosen = [each for each in granted if not project or project in {each.id, each.name}]
    if not chosen:
        raise InvalidRequestError(
            "Your groups have no access to this project, or it does not exist. Send the id or name of one of your "
            "projects in the header OpenAI-Project, or ask the operator for a grant.",
            status_code=403,
            code="project_not_allowed",
        )
    if len(chosen) > 1:
        raise InvalidRequestError(
            "Your groups have access to several projects. Send the id or name of one of them in the header "
            "OpenAI-Project; the official client does with OpenAI(project=…).",
            param="OpenAI-Project",
            code="project_required",
        )
    identity = PERSON_PREFIX + person.subject
    return Access(
        project=chosen[0],
        key_id=identity,
        scopes=person.scopes[chosen[0].name],
        actor=Actor(id=identity, client_address=client_address, request_id=request_id),
        expires_at=person.expires_at,
    )
