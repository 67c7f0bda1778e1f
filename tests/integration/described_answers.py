"""Checks of every answer in the tests against the served OpenAPI document."""

import json
from collections.abc import Mapping
from typing import Any

import jsonschema
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.openapi import document


def closed(schema: Any) -> Any:
    """Return the schema with additional fields forbidden."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    return {"additionalProperties": False, **inner} if "properties" in inner else inner


def problem(
    strict: Mapping[str, Any], operation: Mapping[str, Any], status: int, headers: Mapping[str, str], body: bytes
) -> str | None:
    """Return how an answer deviates from a document that ``closed`` returned, or None."""
    described = operation["responses"].get(str(status))
    if described is None:
        return f"status {status} is not described"
    missing = [name for name, header in described["headers"].items() if header.get("required") and name not in headers]
    if missing:
        return f"headers {missing} are missing"
    content_type = headers.get("content-type", "").partition(";")[0]
    if content_type not in described.get("content", {"": None}):
        return f"content type {content_type!r} is not described"
    if content_type != "application/json":
        return None
    schema = {**described["content"][content_type]["schema"], "components": strict["components"]}
    error = next(jsonschema.Draft202012Validator(schema).iter_errors(json.loads(body)), None)
    return error and f"{error.json_path}: {error.message}"


class DescribedAnswers:
    """ASGI middleware that checks answers; ``problems`` lists each one that deviates from the document."""

    def __init__(self, app: Any) -> None:
        self._app: ASGIApp = app
        self._described = closed(document(app))
        self.problems: list[str] = []
        self.checked = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start: Message = {}
        body = bytearray()

        async def kept(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
            elif len(body) < 1 << 20:
                body.extend(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, kept)
        path = getattr(scope.get("route"), "path_format", None)
        operation = self._described["paths"].get(path, {}).get(scope["method"].lower())
        if operation and start:
            headers = {name.decode().lower(): value.decode("latin-1") for name, value in start["headers"]}
            self.checked += 1
            if found := problem(self._described, operation, start["status"], headers, bytes(body)):
                self.problems.append(f"{scope['method']} {path}: {found}")
