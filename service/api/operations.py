"""What the OpenAPI document says of each route beyond what its signature tells.

A route that is not here is not documented, and a test says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from service.api.schemas import MAX_EXPIRY_S, MIN_EXPIRY_S, FilePurpose


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path.

    Attributes:
        id: its ``operationId``.
        tag: the group that it is shown in.
        errors: statuses besides those that every operation with a key can answer, and why.
        body: the request body where the route reads it by hand, as an OpenAPI media type map.
        example: of the request body where the route's signature has it.
        success: the successful answers where they are no JSON, by status.
        headers: request headers that it reads.
        links: OpenAPI links of its successful answer.
        needs_key: whether it asks for an API key.
        error_schema: the schema of its errors.
    """

    id: str
    tag: str
    errors: Mapping[int, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    example: Mapping[str, Any] | None = None
    success: Mapping[str, Any] = field(default_factory=dict)
    headers: tuple[Mapping[str, Any], ...] = ()
    links: Mapping[str, Any] = field(default_factory=dict)
    needs_key: bool = True
    error_schema: str = "Error"


def _link(operation_id: str, parameter: str, pointer: str = "/id") -> dict[str, Any]:
    return {"operationId": operation_id, "parameters": {parameter: f"$response.body#{pointer}"}}


def _header(name: str, description: str, example: str) -> dict[str, Any]:
    schema = {"type": "string"}
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema,
            "example": example}  # fmt: skip


def _answer_header(description: str, **schema: Any) -> dict[str, Any]:
    return {"description": description, "required": True, "schema": schema}


_NO_BATCH: Final = "The project has no such batch."
_NO_FILE: Final = "The project has no such file, or it was deleted or has expired."
_NO_CURSOR: Final = "`after` names no object of this project (`invalid_value`), or another parameter is wrong."
_PATH_ONLY: Final = "The id holds a character that no id has, e.g. NUL (`invalid_value`)."
_CHAT_BATCH: Final = {
    "input_file_id": "file-0f3c2a",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
    "metadata": {"team": "search"},
}
_BATCH_LINKS: Final = {
    "retrieve": _link("retrieveBatch", "batch_id"),
    "cancel": _link("cancelBatch", "batch_id"),
    "results": _link("retrieveBatchResults", "batch_id"),
    "events": _link("watchBatch", "batch_id"),
}
_UPLOAD_SCHEMA: Final = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {
            "type": "string",
            "contentMediaType": "application/octet-stream",
            "description": "The content. With purpose `batch`: JSON Lines in UTF-8, one request per line, at most 200 "
            "MiB; else at most 512 MiB.",
        },
        "purpose": {"type": "string", "enum": list(get_args(FilePurpose)), "description": "`batch` for input files."},
        "expires_after[anchor]": {
            "type": "string",
            "enum": ["created_at"],
            "description": "From when `expires_after[seconds]` counts. Both or neither.",
        },
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": MIN_EXPIRY_S,
            "maximum": MAX_EXPIRY_S,
            "description": "Seconds until the file is deleted. Without it, a batch file is kept 30 days or as long as "
            "the project's retention says, whichever is shorter.",
        },
    },
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
    "additionalProperties": False,
}

_EVENT_SCHEMA: Final = {
    "type": "object",
    "description": "One event of the stream.",
    "required": ["event", "data"],
    "properties": {
        "id": {"type": "string", "pattern": "^[0-9]+$"},
        "event": {"type": "string", "pattern": r"^(progress|(batch|job)\.[a-z_]+)$"},
        "data": {"type": "string", "contentMediaType": "application/json"},
        "retry": {"type": "integer", "description": "Milliseconds to wait before connecting again."},
    },
}

PARAMETERS: Final[Mapping[str, str]] = {
    "after": "The `id` of the last object of the page before.",
    "before": "The `id` of the first object of the page after.",
    "limit": "At most so many objects.",
    "order": "By creation: `desc` gives the newest first.",
    "purpose": "Only files of this purpose; output and error files have `batch_output`.",
    "file_id": "The `id` of a file.",
    "batch_id": "The `id` of a batch.",
    "model_id": "The `id` of a model; it may hold slashes.",
    "endpoint_id": "The `id` of a webhook endpoint.",
    "kind": "The lines of the output file (answers of status 2xx) or of the error file (everything else).",
    "event_types[]": "Only events of these types.",
    "actor_ids[]": "Only what these API keys did.",
    "resource_ids[]": "Only what was done to these objects.",
    "project_ids[]": "Only events of these projects; a key sees its own project only.",
    "effective_at[gt]": "Only events after this time, in Unix seconds.",
    "effective_at[gte]": "Only events at or after this time, in Unix seconds.",
    "effective_at[lt]": "Only events before this time, in Unix seconds.",
    "effective_at[lte]": "Only events at or before this time, in Unix seconds.",
}

OPERATIONS: Final[Mapping[tuple[str, str], Operation]] = {
    ("post", "/v1/files"): Operation(
        id="createFile",
        tag="Files",
        errors={
            400: "The form or a field is wrong, or a batch file is plainly no JSON Lines (`invalid_file_format`).",
            413: "The file is too large.",
            429: "The project may not store so many bytes (`insufficient_quota`).",
        },
        body={"multipart/form-data": {"schema": _UPLOAD_SCHEMA}},
        links={
            "retrieve": _link("retrieveFile", "file_id"),
            "content": _link("retrieveFileContent", "file_id"),
            "delete": _link("deleteFile", "file_id"),
            "batch": {
                "operationId": "createBatch",
                "requestBody": {
                    "input_file_id": "$response.body#/id",
                    "endpoint": "/v1/chat/completions",
                    "completion_window": "24h",
                },
            },
        },
    ),
    ("get", "/v1/files"): Operation(id="listFiles", tag="Files", errors={400: _NO_CURSOR}),
    ("get", "/v1/files/{file_id}"): Operation(id="retrieveFile", tag="Files", errors={400: _PATH_ONLY, 404: _NO_FILE}),
    ("delete", "/v1/files/{file_id}"): Operation(id="deleteFile", tag="Files", errors={400: _PATH_ONLY, 404: _NO_FILE}),
    ("get", "/v1/files/{file_id}/content"): Operation(
        id="retrieveFileContent",
        tag="Files",
        errors={400: _PATH_ONLY, 404: _NO_FILE},
        success={
            "200": {
                "description": "The content, byte for byte.",
                "content": {"application/octet-stream": {}},
                "headers": {
                    "content-disposition": _answer_header("The file's name (RFC 6266).", type="string"),
                },
            }
        },
    ),
    ("post", "/v1/batches"): Operation(
        id="createBatch",
        tag="Batches",
        errors={
            400: "The body is no JSON object, or a field of it is wrong. `idempotency_key_reused`: the key named "
            "another request before.",
            413: "The body is larger than 1 MB.",
            429: "A limit of the project is reached (`rate_limit_error`: try again after `retry-after` seconds) or "
            "the batch is larger than it ever allows (`insufficient_quota`).",
        },
        body={
            "application/json": {
                "schema": {"$ref": "#/components/schemas/BatchRequest"},
                "example": _CHAT_BATCH,
            }
        },
        headers=(
            _header(
                "Idempotency-Key",
                "A value of the client's own, 1 to 255 printable ASCII characters: requests with the same key make "
                "one batch.",
                "5f7c1c1e-8f0a-4a83-9d0e-0c6f7b0a3d55",
            ),
            _header(
                "X-Stainless-Retry-Count",
                "How often the client has sent this request before; over 0, a batch that the same request made within "
                "25 minutes is answered again. The official client sends it.",
                "0",
            ),
        ),
        links=_BATCH_LINKS,
    ),
    ("get", "/v1/batches"): Operation(id="listBatches", tag="Batches", errors={400: _NO_CURSOR}),
    ("get", "/v1/batches/{batch_id}"): Operation(
        id="retrieveBatch", tag="Batches", errors={400: _PATH_ONLY, 404: _NO_BATCH}, links=_BATCH_LINKS
    ),
    ("post", "/v1/batches/{batch_id}/cancel"): Operation(
        id="cancelBatch",
        tag="Batches",
        errors={400: _PATH_ONLY, 404: _NO_BATCH, 409: "The batch is completed, failed or expired."},
        links={"retrieve": _link("retrieveBatch", "batch_id")},
    ),
    ("get", "/v1/batches/{batch_id}/results"): Operation(
        id="retrieveBatchResults",
        tag="Batches",
        errors={400: "`kind` is wrong, or the id is.", 404: f"{_NO_BATCH[:-1]}, or its file was deleted or expired."},
        success={
            "200": {
                "description": "JSON Lines, each as in the output or error file, in input order.",
                "content": {"application/jsonl": {"schema": {"type": "string"}}},
                "headers": {
                    "x-cloister-lines": _answer_header("How many lines these are.", type="integer", minimum=0),
                    "x-cloister-complete": _answer_header(
                        "`true` once the batch has ended: no line will follow.", type="string", enum=["true", "false"]
                    ),
                },
            }
        },
    ),
    ("get", "/v1/batches/{batch_id}/events"): Operation(
        id="watchBatch",
        tag="Batches",
        errors={400: "`Last-Event-ID` is no id of an event, or the id is wrong.", 404: _NO_BATCH},
        success={
            "200": {
                "description": "Server-sent events. Each has `event`, one of `batch.*`, `job.*` and `progress`, and "
                "`data`, a JSON object: `status`, `request_counts`, `rate_rows_per_second` and `eta_seconds` of the "
                "batch now; of all but `progress` also `at` (Unix seconds) and `data`, and an `id`.",
                "content": {"text/event-stream": {"schema": _EVENT_SCHEMA}},
            },
            "204": {"description": "The batch has ended and the client has all of its events."},
        },
    ),
    ("get", "/v1/models"): Operation(id="listModels", tag="Models"),
    ("get", "/v1/models/{model_id}"): Operation(
        id="retrieveModel",
        tag="Models",
        errors={400: _PATH_ONLY, 404: "There is no such model (`model_not_found`)."},
    ),
    ("get", "/v1/organization/audit_logs"): Operation(id="listAuditLogs", tag="Audit logs", errors={400: _NO_CURSOR}),
    ("post", "/v1/webhook_endpoints"): Operation(
        id="createWebhookEndpoint",
        tag="Webhook endpoints",
        errors={
            400: "The body is no JSON object, or a field of it is wrong.",
            413: "The body is larger than 2 MiB.",
        },
        example={"url": "https://hooks.example.com/batches", "event_types": ["batch.completed", "batch.failed"]},
        links={
            "retrieve": _link("retrieveWebhookEndpoint", "endpoint_id"),
            "delete": _link("deleteWebhookEndpoint", "endpoint_id"),
        },
    ),
    ("get", "/v1/webhook_endpoints"): Operation(
        id="listWebhookEndpoints", tag="Webhook endpoints", errors={400: _NO_CURSOR}
    ),
    ("get", "/v1/webhook_endpoints/{endpoint_id}"): Operation(
        id="retrieveWebhookEndpoint",
        tag="Webhook endpoints",
        errors={400: _PATH_ONLY, 404: "The project has no such webhook endpoint."},
    ),
    ("delete", "/v1/webhook_endpoints/{endpoint_id}"): Operation(
        id="deleteWebhookEndpoint",
        tag="Webhook endpoints",
        errors={400: _PATH_ONLY, 404: "The project has no such webhook endpoint."},
    ),
    ("get", "/healthz"): Operation(id="healthz", tag="Operation", needs_key=False),
    ("get", "/readyz"): Operation(
        id="readyz",
        tag="Operation",
        needs_key=False,
        errors={503: "Not ready; `checks` says what is wrong and what to do."},
        error_schema="NotReady",
    ),
    ("get", "/metrics"): Operation(
        id="metrics",
        tag="Operation",
        needs_key=False,
        success={
            "200": {
                "description": "Prometheus' text format. No label holds an id.",
                "content": {"text/plain": {"schema": {"type": "string"}}},
            }
        },
    ),
}
