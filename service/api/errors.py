"""OpenAI's error envelope for everything that can go wrong in a request."""

from collections.abc import Callable, Coroutine, Mapping, Sequence, Sized
from typing import Any, Final

import psycopg
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.routing import Match

from service.errors import ApiError, InvalidRequestError, ObjectStoreError, UnavailableError

_log = structlog.get_logger(__name__)

_NOT_FOUND: Final = 404
_METHOD_NOT_ALLOWED: Final = 405

# pydantic's name of a problem, with OpenAI's code and message for it.
_CODES: Final[dict[str, tuple[str, str]]] = {
    "missing": ("missing_required_parameter", "Missing required parameter: '{param}'."),
    "extra_forbidden": ("unknown_parameter", "Unknown parameter: '{param}'."),
    "literal_error": ("invalid_value", "Invalid value for '{param}'. Supported values are: {expected}."),
    "literal_type": ("invalid_type", "Invalid type for '{param}': expected one of {expected}, but got {kind} instead."),
    "string_too_short": (
        "empty_string",
        "Invalid '{param}': empty string. Expected a string with minimum length 1, but got an empty string instead.",
    ),
    "string_too_long": (
        "string_above_max_length",
        (
            "Invalid '{param}': string too long. Expected a string with maximum length {max_length}, "
            "but got a string with length {length} instead."
        ),
    ),
    "key_too_long": (
        "property_name_above_max_length",
        (
            "Invalid property name in '{parent}': it is too long. Expected a string with maximum length "
            "{max_length}, but got a string with length {length} instead."
        ),
    ),
    "too_long": (
        "object_above_max_properties",
        (
            "Invalid '{param}': too many properties. Expected an object with at most {max_length} properties, "
            "but got an object with {length} properties instead."
        ),
    ),
    "greater_than_equal": (
        "integer_below_min_value",
        "Invalid '{param}': integer below minimum value. Expected a value >= {ge}.",
    ),
    "less_than_equal": (
        "integer_above_max_value",
        "Invalid '{param}': integer above maximum value. Expected a value <= {le}.",
    ),
}
_EXPECTED_TYPES: Final = {"string": "a string", "int": "an integer", "dict": "an object", "model": "an object"}
_JSON_TYPES: Final[Sequence[tuple[type, str]]] = (
    (bool, "a boolean"),
    (int, "an integer"),
    (float, "a number"),
    (str, "a string"),
    (list, "an array"),
    (dict, "an object"),
)


def invalid_request(problem: Mapping[str, Any]) -> InvalidRequestError:
    """Translate a problem that pydantic found (an item of ``ValidationError.errors()``) into OpenAI's words.

    OpenAI also quotes the value. It can be a prompt, and clients log errors, so here it is left out.
    """
    value, location, kind = problem.get("input"), [str(step) for step in problem["loc"]], str(problem["type"])
    # pydantic reports a property's name, as opposed to its value, with the location (field, name, "[key]").
    is_name = len(location) > 2 and location[-1] == "[key]"  # noqa: PLR2004 - a property may itself be called [key]
    if is_name:
        location.pop()
    param = ".".join(location) or None
    given = next((name for json_type, name in _JSON_TYPES if isinstance(value, json_type)), "null")
    if kind == "json_invalid":
        return InvalidRequestError("The request body is not valid JSON. Send one JSON object in UTF-8.")
    if param is None:
        return InvalidRequestError(f"The request body must be a JSON object, but it is {given}.")
    # OpenAI distinguishes some problems that pydantic reports under one name.
    if kind == "literal_error" and not isinstance(value, str):
        kind = "literal_type"
    elif kind in {"too_short", "too_long"} and isinstance(value, str):  # a string that another check had before
        kind = f"string_{kind}"
    if kind == "string_too_long" and is_name:
        kind = "key_too_long"
    if kind in _CODES:
        code, text = _CODES[kind]
        message = text.format(
            param=param,
            parent=".".join(location[:-1]),
            kind=given,
            length=len(value) if isinstance(value, Sized) else None,
            **problem.get("ctx", {}),
        )
        return InvalidRequestError(message, param=param, code=code)
    if expected := _EXPECTED_TYPES.get(kind.split("_")[0]):
        return InvalidRequestError(
            f"Invalid type for '{param}': expected {expected}, but got {given} instead.",
            param=param,
            code="invalid_type",
        )
    return InvalidRequestError(f"Invalid '{param}': {problem['msg']}.", param=param, code="invalid_value")


def error_response(error: ApiError, **extra: Any) -> JSONResponse:
    """Return the HTTP response for an error. ``extra`` holds fields beside ``error``."""
    envelope = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return JSONResponse({"error": envelope, **extra}, status_code=error.status_code, headers=error.headers)


async def _respond(request: Request, error: Exception) -> Response:
    """Map an expected exception to OpenAI's envelope."""
    match error:
        case ApiError():
            return error_response(error)
        case RequestValidationError():
            problem = error.errors()[0]
            # FastAPI prefixes the location with "path", "query", "header" or "body".
            return error_response(invalid_request({**problem, "loc": problem["loc"][1:]}))
        case HTTPException():  # the router refuses the request
            mapped = InvalidRequestError(str(error.detail), status_code=error.status_code, headers=error.headers)
            target = f"{request.method} {request.url.path}"
            if error.status_code == _NOT_FOUND:
                mapped.message = f"Unknown request URL: {target}. Please check the URL for typos."
                mapped.code = "unknown_url"
            elif error.status_code == _METHOD_NOT_ALLOWED:
                mapped.message = f"Not allowed: {target}. The URL exists, but not with this HTTP method."
                mapped.code = "method_not_allowed"
                # The router lists only the methods of the first route with this path.
                app: FastAPI = request.app
                matching = (route for route in app.routes if route.matches(request.scope)[0] is not Match.NONE)
                methods = {method for route in matching for method in getattr(route, "methods", None) or ()}
                mapped.headers = {"allow": ", ".join(sorted(methods))}
            return error_response(mapped)
        case MultiPartException():
            return error_response(InvalidRequestError(f"Cannot read the multipart form: {error}"))
        case ObjectStoreError():
            _log.warning("object store unavailable", error=str(error))
            return error_response(UnavailableError("The object store does not answer. Please try again."))
        case _:
            # The class only: Postgres quotes values in its messages.
            _log.warning("database unavailable", error=type(error).__name__)
            return error_response(UnavailableError("The database does not answer. Please try again."))


_Handler = Callable[[Request, Any], Coroutine[Any, Any, Response]]
EXCEPTION_HANDLERS: Final[dict[int | type[Exception], _Handler]] = dict.fromkeys(
    (
        ApiError,
        RequestValidationError,
        HTTPException,
        MultiPartException,
        ObjectStoreError,
        psycopg.OperationalError,
        psycopg.InterfaceError,
    ),
    _respond,
)
"""Answers every expected error in OpenAI's envelope. ``RequestMiddleware`` answers unexpected errors."""
