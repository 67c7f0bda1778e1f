"""``GET /openapi.json``, and the building blocks with which routes describe their responses.

A route's decorator holds its documentation: summary, description, operation id, and ``responses=described(…)``.
Routers add what all of their routes share. To add a route, write it in ``service.api.routes``; nothing here changes.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse

from service.api.schemas import BatchRequest, Error

router = APIRouter()

Responses = dict[int | str, dict[str, Any]]

_DESCRIPTION: Final = (
    "OpenAI's Files, Batches and Models APIs, and cloister's extensions: partial results and events of a batch, "
    "webhook endpoints, audit logs, deletion receipts, usage, costs and capacity. Times are Unix seconds, sizes are "
    "bytes."
)
_REFERENCE: Final = "#/components/schemas/"
_RETRY_STATUSES: Final = frozenset({429, 503})
_REQUEST_ID: Final = {
    "description": "Identifies the request in the log.",
    "required": True,
    "schema": {"type": "string", "pattern": "^req_[0-9a-f]{32}$"},
}
_RETRY_AFTER: Final = {
    "description": "Seconds to wait before the next attempt; missing if waiting does not help.",
    "schema": {"type": "integer", "minimum": 1},
}
INVALID_CURSOR: Final = "`after` is not the id of an object of this project (`invalid_value`), or a parameter is wrong."
INVALID_ID: Final = "The id holds a character that no id has, such as NUL (`invalid_value`)."


def described(
    errors: Mapping[int, str] | None = None,
    *,
    description: str = "Success.",
    content: Mapping[str, Any] | None = None,
    headers: Mapping[str, Any] | None = None,
    links: Mapping[str, Any] | None = None,
    error_model: type[Error] = Error,
) -> Responses:
    """Build the ``responses`` of a route or router: the successful response and errors by status.

    Args:
        errors: descriptions of errors, by HTTP status.
        description: of the successful response.
        content: of the successful response, by media type, if it is not the JSON of the return type.
        headers: of the successful response, besides ``x-request-id``.
        links: OpenAPI links of the successful response.
        error_model: the schema of the errors.
    """
    success: dict[str, Any] = {"description": description, "headers": {"x-request-id": _REQUEST_ID, **(headers or {})}}
    if content:
        success["content"] = dict(content)
    if links:
        success["links"] = dict(links)
    responses: Responses = {200: success}
    for status, text in (errors or {}).items():
        error_headers: dict[str, Any] = {"x-request-id": _REQUEST_ID}
        if status in _RETRY_STATUSES:
            error_headers["retry-after"] = _RETRY_AFTER
        responses[status] = {"description": text, "model": error_model, "headers": error_headers}
    return responses


TOO_MANY_WRONG_KEYS: Final = (
    "The address of the client has sent more than 20 incorrect API keys in a minute, and this is another one "
    "(`rate_limit_exceeded`)."
)
NO_ROOM: Final = (
    "The server has no room on its disk for the content, or the key has many large uploads and partial results in "
    "progress: try again after `retry-after` seconds (`rate_limit_exceeded`)."
)
PUBLIC: Final = described({500: "An unexpected error. The log has details under the request id."})
WITH_KEY: Final = described(
    {
        401: "The request has no API key, or an invalid one (`invalid_api_key`).",
        403: "The API key lacks the scope that this requires (`missing_scope`).",
        429: TOO_MANY_WRONG_KEYS,
        500: "An unexpected error. The log has details under the request id.",
        503: "The database or the object store does not answer. Try again after `retry-after` seconds.",
    }
)


def link(operation_id: str, parameter: str) -> dict[str, Any]:
    """Return an OpenAPI link to an operation that takes the ``id`` of this response."""
    return {"operationId": operation_id, "parameters": {parameter: "$response.body#/id"}}


@router.get("/openapi.json", include_in_schema=False)
def read_openapi(request: Request) -> JSONResponse:
    """Return the document. It needs no API key."""
    app: FastAPI = request.app
    app.openapi_schema = app.openapi_schema or document(app)
    return JSONResponse(app.openapi_schema)


def document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of an application."""
    result = get_openapi(
        title="cloister",
        version=version("cloister"),
        description=_DESCRIPTION,
        routes=app.routes,
        openapi_version="3.1.0",
    )
    for methods in result["paths"].values():
        for operation in methods.values():
            # Validation errors have status 400 and OpenAI's envelope.
            operation["responses"].pop("422", None)
            for parameter in operation.get("parameters", ()):
                schema = parameter["schema"]
                schema.pop("title", None)
                # An optional parameter can be omitted, but it cannot be null.
                kinds = [kind for kind in schema.pop("anyOf", ()) if kind != {"type": "null"}]
                for kind in kinds:
                    schema |= kind
    schemas = result["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    # The route that creates a batch reads its body itself, so FastAPI does not know the schema.
    batch_request = BatchRequest.model_json_schema(ref_template=_REFERENCE + "{model}")
    schemas |= {**batch_request.pop("$defs", {}), "BatchRequest": batch_request}
    return result
