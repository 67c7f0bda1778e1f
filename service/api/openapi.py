"""``GET /openapi.json``: every route, every answer. FastAPI knows the signatures, ``operations`` the rest."""

import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse

from service.api.operations import OPERATIONS, PARAMETERS, Operation
from service.api.schemas import BatchRequest

router = APIRouter()

_REFERENCE: Final = "#/components/schemas/"
_DESCRIPTION: Final = (
    "OpenAI's Files, Batches and Models APIs, and what cloister adds: partial results and events of a batch, webhook "
    "endpoints, audit logs. Times are Unix seconds, sizes bytes."
)
_SCOPES: Final = "The API key has no scope for this (`missing_scope`)."
_ALWAYS: Final[Mapping[int, str]] = {500: "An error that nobody foresaw; the log has more at the request id."}
_WITH_KEY: Final[Mapping[int, str]] = {
    401: "No API key, or none that is valid (`invalid_api_key`).",
    403: _SCOPES,
    503: "The database or the object store does not answer. Try again after `retry-after` seconds.",
}
_RETRY_AFTER: Final = frozenset({429, 503})
_ERROR: Final[Mapping[str, Any]] = {
    "type": "object",
    "description": "OpenAI's error envelope.",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string", "description": "What is wrong, where, and what to do."},
                "type": {
                    "type": "string",
                    "enum": ["invalid_request_error", "rate_limit_error", "insufficient_quota", "server_error"],
                },
                "param": {"type": ["string", "null"], "description": "The parameter that is wrong."},
                "code": {"type": ["string", "null"], "description": "For programs, e.g. `invalid_api_key`."},
            },
        }
    },
}
_REQUEST_ID: Final = {
    "description": "Names the request in the log.",
    "required": True,
    "schema": {"type": "string", "pattern": "^req_[0-9a-f]{32}$"},
}
_RETRY_AFTER_HEADER: Final = {
    "description": "Seconds to wait before the next attempt; missing where waiting does not help.",
    "schema": {"type": "integer", "minimum": 1},
}


@router.get("/openapi.json", include_in_schema=False)
def read_openapi(request: Request) -> JSONResponse:
    """This document; it needs no API key."""
    app: FastAPI = request.app
    app.openapi_schema = app.openapi_schema or document(app)
    return JSONResponse(app.openapi_schema)


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI 3.1 document of an application.

    Raises:
        KeyError: a route is not in ``OPERATIONS``.
    """
    made = get_openapi(
        title="cloister",
        version=version("cloister"),
        description=_DESCRIPTION,
        routes=app.routes,
        openapi_version="3.1.0",
    )
    for path, methods in made["paths"].items():
        for method, described in methods.items():
            _complete(described, OPERATIONS[method, path])
    made["components"] = {
        "schemas": _schemas(made["components"]["schemas"]),
        "securitySchemes": {
            "apiKey": {"type": "http", "scheme": "bearer", "description": "A key of a project, `sk-cloister-…`."}
        },
    }
    return made


def _complete(described: dict[str, Any], operation: Operation) -> None:
    summary, _, rest = re.sub(r"\n*Raises:.*", "", described.get("description", ""), flags=re.DOTALL).partition("\n\n")
    described |= {"operationId": operation.id, "tags": [operation.tag], "summary": summary.strip().rstrip(".")}
    described["description"] = rest.strip().replace("``", "`") or summary.replace("``", "`")
    described["security"] = [{"apiKey": []}] if operation.needs_key else []
    described["parameters"] = [
        *(_parameter(parameter) for parameter in described.get("parameters", ())),
        *operation.headers,
    ]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": operation.body}
    if operation.example is not None:
        described["requestBody"]["content"]["application/json"]["example"] = operation.example
    described["responses"] = _responses(described["responses"], operation)


def _parameter(described: dict[str, Any]) -> dict[str, Any]:
    """A parameter that may be left out is not one that may be null."""
    schema = {key: value for key, value in described["schema"].items() if key != "title"}
    if "anyOf" in schema:
        (kind,) = [kind for kind in schema.pop("anyOf") if kind != {"type": "null"}]
        schema |= kind
    name = described["name"]
    if name == "last-event-id":
        text = "The `id` of the last event that the client got: it gets those after it."
        return {**described, "name": "Last-Event-ID", "schema": schema, "description": text, "example": "17"}
    return {**described, "schema": schema, "description": PARAMETERS[name]}


def _responses(described: Mapping[str, Any], operation: Operation) -> dict[str, Any]:
    answers = dict(operation.success) or {"200": {**described["200"], "description": "Done."}}
    errors = {**_ALWAYS, **(_WITH_KEY if operation.needs_key else {}), **operation.errors}
    told = {status: _with_headers(answer, operation.links) for status, answer in answers.items()}
    schema = operation.error_schema
    return told | {str(status): _error(status, text, schema) for status, text in sorted(errors.items())}


def _with_headers(answer: Mapping[str, Any], links: Mapping[str, Any]) -> dict[str, Any]:
    headers = {"x-request-id": _REQUEST_ID, **answer.get("headers", {})}
    return {**answer, "headers": headers, **({"links": links} if links else {})}


def _error(status: int, text: str, schema: str) -> dict[str, Any]:
    headers: dict[str, Any] = {"x-request-id": _REQUEST_ID}
    if status in _RETRY_AFTER:
        headers["retry-after"] = _RETRY_AFTER_HEADER
    return {
        "description": text,
        "headers": headers,
        "content": {"application/json": {"schema": {"$ref": _REFERENCE + schema}}},
    }


def _schemas(described: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of bodies and answers. Answers leave out nothing, so all of their fields are required."""
    schemas = {
        name: dict(schema)
        for name, schema in described.items()
        if name not in {"HTTPValidationError", "ValidationError"}
    }
    for name, schema in schemas.items():
        if not name.endswith("Request") and "properties" in schema:
            schema["required"] = list(schema["properties"])
    request = BatchRequest.model_json_schema(ref_template=_REFERENCE + "{model}")
    checks = {"type": "object", "additionalProperties": {"$ref": f"{_REFERENCE}Check"}}
    not_ready = {**_ERROR, "properties": {**_ERROR["properties"], "checks": checks}}
    more = {"BatchRequest": request, "Error": dict(_ERROR), "NotReady": not_ready}
    return {**schemas, **request.pop("$defs", {}), **more}
