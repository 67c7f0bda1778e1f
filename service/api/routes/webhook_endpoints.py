"""``/v1/webhook_endpoints``, in the shape that the official client's ``client.webhooks`` expects."""

from typing import Annotated, Any, Final, Literal, Self

from fastapi import APIRouter, Body, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from service.api.dependencies import AdminAccess, BackendsDependency
from service.api.openapi import INVALID_CURSOR, INVALID_ID, WITH_KEY, described, link
from service.api.schemas import Answer, Page, Text
from service.errors import InvalidRequestError, NotFoundError, SettingsError, UnavailableError, unknown_cursor
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

router = APIRouter(prefix="/v1/webhook_endpoints", tags=["Webhook endpoints"], responses=WITH_KEY)

_NO_ENDPOINT: Final = "The project has no such webhook endpoint."

EndpointId = Annotated[Text, Path(description="The `id` of a webhook endpoint.")]


class WebhookEndpointRequest(BaseModel):
    """The body of ``POST /v1/webhook_endpoints``."""

    model_config = ConfigDict(extra="forbid")

    url: Annotated[Text, Field(max_length=MAX_URL_LENGTH)]
    event_types: Annotated[list[EventType], Field(min_length=1)]
    name: Annotated[Text, Field(max_length=256)] = ""


class WebhookEndpointObject(Answer):
    """A webhook endpoint."""

    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    created_at: int
    name: str
    url: str
    event_types: list[str]

    @classmethod
    def from_endpoint(cls, endpoint: Endpoint, **extra: Any) -> Self:
        """Return a stored endpoint as clients see it. ``extra`` holds the fields that a subclass adds."""
        return cls(
            id=endpoint.id,
            created_at=int(endpoint.created_at.timestamp()),
            name=endpoint.name,
            url=endpoint.url,
            event_types=endpoint.events,
            **extra,
        )


class NewWebhookEndpointObject(WebhookEndpointObject):
    """A new webhook endpoint with the secret that signs its messages, which is not shown again."""

    signing_secret: str


class DeletedWebhookEndpoint(Answer):
    """The answer to the deletion of a webhook endpoint."""

    id: str
    object: Literal["webhook_endpoint.deleted"] = "webhook_endpoint.deleted"
    deleted: Literal[True] = True


@router.post(
    "",
    operation_id="createWebhookEndpoint",
    summary="Create a webhook endpoint",
    description="Create a webhook endpoint. The answer holds its signing secret, which is not shown again.",
    responses=described(
        {400: "The body is not a JSON object, or a field is invalid.", 413: "The body is larger than 2 MiB."},
        links={
            "retrieve": link("retrieveWebhookEndpoint", "endpoint_id"),
            "delete": link("deleteWebhookEndpoint", "endpoint_id"),
        },
    ),
)
def create_webhook_endpoint(
    backends: BackendsDependency,
    access: AdminAccess,
    request: Annotated[
        WebhookEndpointRequest,
        Body(
            examples=[
                {"url": "https://hooks.example.com/batches", "event_types": ["batch.completed", "batch.failed"]},
            ]
        ),
    ],
) -> NewWebhookEndpointObject:
    """Create an endpoint and return its signing secret.

    Raises:
        InvalidRequestError: messages cannot or must not be sent to the URL.
        UnavailableError: the stack has no key to store a secret with.
    """
    try:
        endpoint, secret = create_endpoint(
            backends.pool,
            backends.encryption_keys,
            project_id=access.project.id,
            url=request.url,
            events=request.event_types,
            name=request.name,
            actor=access.actor,
            networks=backends.webhook_networks,
        )
    except SettingsError as error:
        raise UnavailableError(f"This stack has no webhooks: {error}.") from error
    except WebhookUrlError as error:
        raise InvalidRequestError(f"Invalid 'url': {error}.", param="url", code="invalid_value") from error
    return NewWebhookEndpointObject.from_endpoint(endpoint, signing_secret=secret)


@router.get(
    "",
    operation_id="listWebhookEndpoints",
    summary="List webhook endpoints",
    description="List the webhook endpoints of the project, newest first.",
    responses=described({400: INVALID_CURSOR}),
)
def list_webhook_endpoints(
    backends: BackendsDependency,
    access: AdminAccess,
    after: Annotated[Text | None, Query(description="The `id` of the last object of the previous page.")] = None,
    limit: Annotated[int, Query(ge=0, le=100, description="The most objects to return.")] = 20,
) -> Page[WebhookEndpointObject]:
    """List the webhook endpoints of the project, newest first.

    Raises:
        InvalidRequestError: ``after`` is not an endpoint of this project.
    """
    project_id = access.project.id
    if after and find_endpoint(backends.pool, project_id=project_id, endpoint_id=after) is None:
        raise unknown_cursor("webhook endpoint", after)
    found = list_endpoints(backends.pool, project_id=project_id, limit=limit + 1, after=after or None)
    objects = [WebhookEndpointObject.from_endpoint(endpoint) for endpoint in found]
    return Page[WebhookEndpointObject].of(objects, limit=limit)


@router.get(
    "/{endpoint_id}",
    operation_id="retrieveWebhookEndpoint",
    summary="Retrieve a webhook endpoint",
    description="Return one webhook endpoint, without its secret.",
    responses=described({400: INVALID_ID, 404: _NO_ENDPOINT}),
)
def retrieve_webhook_endpoint(
    backends: BackendsDependency, access: AdminAccess, endpoint_id: EndpointId
) -> WebhookEndpointObject:
    """Return one webhook endpoint, without its secret."""
    endpoint = find_endpoint(backends.pool, project_id=access.project.id, endpoint_id=endpoint_id)
    if endpoint is None:
        raise NotFoundError(f"No webhook endpoint found with id '{endpoint_id}'.", param="webhook_endpoint_id")
    return WebhookEndpointObject.from_endpoint(endpoint)


@router.delete(
    "/{endpoint_id}",
    operation_id="deleteWebhookEndpoint",
    summary="Delete a webhook endpoint",
    description="Delete one webhook endpoint. Its pending deliveries are dropped.",
    responses=described({400: INVALID_ID, 404: _NO_ENDPOINT}),
)
def delete_webhook_endpoint(
    backends: BackendsDependency, access: AdminAccess, endpoint_id: EndpointId
) -> DeletedWebhookEndpoint:
    """Delete one webhook endpoint and its pending deliveries."""
    project_id = access.project.id
    if not delete_endpoint(backends.pool, project_id=project_id, endpoint_id=endpoint_id, actor=access.actor):
        raise NotFoundError(f"No webhook endpoint found with id '{endpoint_id}'.", param="webhook_endpoint_id")
    return DeletedWebhookEndpoint(id=endpoint_id)
