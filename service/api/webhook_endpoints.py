"""The routes of ``/v1/webhook_endpoints``, in the shape that the official client's ``client.webhooks`` expects."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from service.api.authentication import AdminAccess
from service.api.parts import PartsDependency
from service.api.schemas import Page, Text, page
from service.errors import InvalidRequestError, NotFoundError
from service.webhooks import (
    MAX_URL_LENGTH,
    Endpoint,
    EventType,
    WebhookUrlError,
    create_endpoint,
    delete_endpoint,
    find_endpoint,
    list_endpoints,
)

router = APIRouter(prefix="/v1/webhook_endpoints")


class WebhookEndpointRequest(BaseModel):
    """The body of ``POST /v1/webhook_endpoints``."""

    model_config = ConfigDict(extra="forbid")

    url: Annotated[Text, Field(max_length=MAX_URL_LENGTH)]
    event_types: Annotated[list[EventType], Field(min_length=1)]
    name: Annotated[Text, Field(max_length=256)] = ""


class WebhookEndpointObject(BaseModel):
    """A webhook endpoint."""

    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    created_at: int
    name: str
    url: str
    event_types: list[str]


class NewWebhookEndpointObject(WebhookEndpointObject):
    """A webhook endpoint just made, with the secret that its messages are signed with: it is not shown again."""

    signing_secret: str


class DeletedWebhookEndpoint(BaseModel):
    """The answer to the deletion of a webhook endpoint."""

    id: str
    object: Literal["webhook_endpoint.deleted"] = "webhook_endpoint.deleted"
    deleted: Literal[True] = True


def _object(endpoint: Endpoint) -> WebhookEndpointObject:
    return WebhookEndpointObject(
        id=endpoint.id,
        created_at=int(endpoint.created_at.timestamp()),
        name=endpoint.name,
        url=endpoint.url,
        event_types=endpoint.events,
    )


def _no_such_endpoint(endpoint_id: str) -> NotFoundError:
    return NotFoundError(f"No webhook endpoint found with id '{endpoint_id}'.", param="webhook_endpoint_id")


@router.post("")
def create_webhook_endpoint(
    parts: PartsDependency, access: AdminAccess, request: WebhookEndpointRequest
) -> NewWebhookEndpointObject:
    """Makes an endpoint and shows its signing secret, this once.

    Raises:
        InvalidRequestError: no message can or may be sent to that URL.
    """
    try:
        endpoint, secret = create_endpoint(
            parts.pool,
            project_id=access.project.id,
            url=request.url,
            events=request.event_types,
            name=request.name,
            actor=access.key_id,
        )
    except WebhookUrlError as error:
        raise InvalidRequestError(f"Invalid 'url': {error}.", param="url", code="invalid_value") from error
    return NewWebhookEndpointObject(**_object(endpoint).model_dump(), signing_secret=secret)


@router.get("")
def list_webhook_endpoints(
    parts: PartsDependency,
    access: AdminAccess,
    after: Annotated[Text | None, Query()] = None,
    limit: Annotated[int, Query(ge=0, le=100)] = 20,
) -> Page[WebhookEndpointObject]:
    """Lists endpoints, the newest first.

    Raises:
        InvalidRequestError: ``after`` names no endpoint of this project.
    """
    project_id = access.project.id
    if after and find_endpoint(parts.pool, project_id=project_id, endpoint_id=after) is None:
        raise InvalidRequestError(
            f"Invalid 'after': there is no webhook endpoint {after!r}. Give the id of the last one of the page before.",
            param="after",
            code="invalid_value",
        )
    found = list_endpoints(parts.pool, project_id=project_id, limit=limit + 1, after=after or None)
    return Page[WebhookEndpointObject](**page([_object(endpoint) for endpoint in found], limit=limit))


@router.get("/{endpoint_id}")
def retrieve_webhook_endpoint(parts: PartsDependency, access: AdminAccess, endpoint_id: Text) -> WebhookEndpointObject:
    """Tells about one endpoint, without its secret."""
    endpoint = find_endpoint(parts.pool, project_id=access.project.id, endpoint_id=endpoint_id)
    if endpoint is None:
        raise _no_such_endpoint(endpoint_id)
    return _object(endpoint)


@router.delete("/{endpoint_id}")
def delete_webhook_endpoint(parts: PartsDependency, access: AdminAccess, endpoint_id: Text) -> DeletedWebhookEndpoint:
    """Deletes an endpoint; what was still to be sent to it is not."""
    project_id, actor = access.project.id, access.key_id
    if not delete_endpoint(parts.pool, project_id=project_id, endpoint_id=endpoint_id, actor=actor):
        raise _no_such_endpoint(endpoint_id)
    return DeletedWebhookEndpoint(id=endpoint_id)
