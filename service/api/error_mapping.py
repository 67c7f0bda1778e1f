"""Makes OpenAI's error envelope of everything that can go wrong in a request."""

from collections.abc import Mapping, Sequence, Sized
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

# What is wrong → what OpenAI calls it, and its message.
_CODES: Final[dict[str, tuple[str, str]]] = {
    "missing": ("missing_required_parameter", "Missing required parameter: '{param}'."),
    "extra_forbidden": ("unknown_parameter", "Unknown parameter: '{param}'."),
    "literal_error": ("invalid_value", "Invalid value for '{param}': {quoted}. Supported values are: {expected}."),
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
            "Invalid property name in '{parent}': {quoted} is too long. Expected a string with maximum length "
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
        "Invalid '{param}': integer below minimum value. Expected a value >= {ge}, but got {plain} instead.",
    ),
    "less_than_equal": (
        "integer_above_max_value",
        "Invalid '{param}': integer above maximum value. Expected a value <= {le}, but got {plain} instead.",
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


def json_type(value: object) -> str:
    """What JSON calls the type of a value, with its article."""
    return next((name for kind, name in _JSON_TYPES if isinstance(value, kind)), "null")


def _is_of_name(problem: Mapping[str, Any]) -> bool:
    """Whether a property's name is wrong and not its value: pydantic's location is then field, name, ``[key]``."""
    location: Sequence[str | int] = problem["loc"]
    return len(location) > 2 and location[-1] == "[key]"  # noqa: PLR2004 - a property may itself be called [key]


def _kind(problem: Mapping[str, Any]) -> str:
    """What is wrong: pydantic's name for it, or one of ours where OpenAI tells apart what pydantic does not."""
    kind: str = problem["type"]
    is_text = isinstance(problem.get("input"), str)
    if kind == "literal_error" and not is_text:
        return "literal_type"
    if kind in {"too_short", "too_long"} and is_text:  # of a string that had another check before
        return f"string_{kind}"
    if kind == "string_too_long" and _is_of_name(problem):
        return "key_too_long"
    return kind


def _described(value: object) -> dict[str, object]:
    """How a message may tell of a value: quoted or plain, both cut short, by its type, and by its length."""
    length = len(value) if isinstance(value, Sized) else None
    return {"quoted": repr(value)[:100], "plain": str(value)[:100], "kind": json_type(value), "length": length}


def invalid_request(problem: Mapping[str, Any]) -> InvalidRequestError:
    """OpenAI's words for one problem that pydantic found (an item of ``ValidationError.errors()``)."""
    location = [str(step) for step in (problem["loc"][:-1] if _is_of_name(problem) else problem["loc"])]
    param = ".".join(location) or None
    kind = _kind(problem)
    if kind == "json_invalid":
        return InvalidRequestError("The request body is not valid JSON. Send one JSON object in UTF-8.")
    if param is None:
        return InvalidRequestError(
            f"The request body must be a JSON object, but it is {json_type(problem.get('input'))}."
        )
    if kind in _CODES:
        code, text = _CODES[kind]
        parent = ".".join(location[:-1])
        message = text.format(param=param, parent=parent, **_described(problem.get("input")), **problem.get("ctx", {}))
        return InvalidRequestError(message, param=param, code=code)
    if expected := _EXPECTED_TYPES.get(kind.split("_")[0]):
        return InvalidRequestError(
            f"Invalid type for '{param}': expected {expected}, but got {json_type(problem.get('input'))} instead.",
            param=param,
            code="invalid_type",
        )
    return InvalidRequestError(f"Invalid '{param}': {problem['msg']}.", param=param, code="invalid_value")


def error_response(error: ApiError, **beside: Any) -> JSONResponse:
    """The HTTP answer that tells an error, with what else is to stand beside it."""
    envelope = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return JSONResponse({"error": envelope, **beside}, status_code=error.status_code, headers=error.headers)


def _http_error(request: Request, error: HTTPException) -> ApiError:
    """OpenAI's words for what the router itself refuses."""
    mapped: ApiError = InvalidRequestError(str(error.detail))
    mapped.status_code = error.status_code
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:  # noqa: PLR2004 - an HTTP status is clearest as its number
        mapped.message = f"Unknown request URL: {where}. Please check the URL for typos."
        mapped.code = "unknown_url"
    elif error.status_code == 405:  # noqa: PLR2004 - as above
        mapped.message = f"Not allowed: {where}. The URL exists, but takes another HTTP method."
        mapped.code = "method_not_allowed"
    return mapped


def _methods_of_path(request: Request) -> list[str]:
    """The methods of all routes with this path; the router itself names those of the first only."""
    app: FastAPI = request.app
    found = (route for route in app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in found for method in getattr(route, "methods", None) or ()})


async def _tell_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)  # noqa: S101 - registered for this class only
    return error_response(error)


async def _tell_validation_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for this class only
    problem = error.errors()[0]
    # FastAPI says first where the parameter stood: in the path, the query or the body.
    return error_response(invalid_request({**problem, "loc": problem["loc"][1:]}))


async def _tell_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for this class only
    response = error_response(_http_error(request, error))
    response.headers.update(error.headers or {})
    if error.status_code == 405:  # noqa: PLR2004 - as above
        response.headers["allow"] = ", ".join(_methods_of_path(request))
    return response


async def _tell_multipart_error(_request: Request, error: Exception) -> Response:
    return error_response(InvalidRequestError(f"Cannot read the multipart form: {error}"))


async def _tell_database_down(_request: Request, error: Exception) -> Response:
    # Only the class: a message of Postgres may quote values.
    _log.warning("database unavailable", error=type(error).__name__)
    return error_response(UnavailableError("The database does not answer. Please try again."))


async def _tell_object_store_down(_request: Request, error: Exception) -> Response:
    _log.warning("object store unavailable", error=str(error))
    return error_response(UnavailableError("The object store does not answer. Please try again."))


def add_error_mapping(app: FastAPI) -> None:
    """Makes an application answer every error in OpenAI's envelope, but for those nobody foresaw (``RequestLog``)."""
    app.add_exception_handler(ApiError, _tell_api_error)
    app.add_exception_handler(RequestValidationError, _tell_validation_error)
    app.add_exception_handler(HTTPException, _tell_http_error)
    app.add_exception_handler(MultiPartException, _tell_multipart_error)
    app.add_exception_handler(psycopg.OperationalError, _tell_database_down)
    app.add_exception_handler(psycopg.InterfaceError, _tell_database_down)
    app.add_exception_handler(ObjectStoreError, _tell_object_store_down)
