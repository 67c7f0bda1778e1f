"""Areas of the table, and points of the contract that the checks cite.

Sources: OpenAI's API reference (https://platform.openai.com/docs/api-reference/files, …/batch and …/models), its guide
(https://platform.openai.com/docs/guides/batch), the official clients, and observed responses of its API. A point that
ends with "(one source)" has no second source.
"""

from typing import Final

# Stem of each module of checks → name of its area, in the order of the table.
AREAS: Final = {
    "test_uploads": "uploads",
    "test_files": "files",
    "test_listing": "listing and paging",
    "test_batches": "batches",
    "test_states": "states",
    "test_validation": "validation errors",
    "test_cancel": "cancel",
    "test_output_files": "output files and lines",
    "test_usage": "usage and counts",
    "test_retries": "retries",
    "test_models": "models",
    "test_errors": "errors and envelope",
    "test_authentication": "authentication",
    "test_isolation": "isolation of projects",
    "test_node": "official Node client",
    "test_extensions": "beyond the contract",
}

POINTS: Final = {
    "U1": "POST /v1/files accepts a multipart form with file and purpose and returns a File object: id, object, "
    "bytes, created_at, expires_at, filename, purpose, status.",
    "U2": "expires_after[anchor] is created_at, expires_after[seconds] is from 3600 to 2592000.",
    "U3": "A file of purpose batch expires after 30 days by default.",
    "U4": "A batch input has at most 200 MB.",
    "U5": "A file of purpose batch that is obviously not JSONL is refused at upload, or fails its batch.",
    "F1": "GET /v1/files/{id} returns the File object; an unknown id is a 404.",
    "F2": "GET /v1/files/{id}/content returns the uploaded bytes.",
    "F3": 'DELETE /v1/files/{id} returns {id, object: "file", deleted: true}; afterwards the file is a 404.',
    "L1": 'A listing has object "list", data, first_id, last_id and has_more.',
    "L2": "GET /v1/files accepts purpose, limit from 1 to 10000 and order asc or desc; the default is newest first.",
    "L3": "after is the id of an object; no object is dropped or listed twice, even among those of the same second.",
    "L4": "GET /v1/batches accepts limit up to 100, by default 20; over 100 is integer_above_max_value, 0 an empty "
    "list, below 0 integer_below_min_value.",
    "L5": "The official clients page with after=data[-1].id and stop at an empty page.",
    "B1": "POST /v1/batches accepts input_file_id, endpoint, completion_window, metadata and output_expires_after, and "
    "returns 200 with a Batch object.",
    "B2": "A Batch object has id, object, endpoint, input_file_id, completion_window, status and created_at; its times "
    "are Unix seconds.",
    "B3": 'completion_window is "24h" and nothing else.',
    "B4": "metadata has at most 16 pairs, keys of at most 64 and values of at most 512 characters.",
    "B5": "output_expires_after has anchor created_at and seconds from 3600 to 2592000.",
    "B6": "A wrong creation is a 400 with missing_required_parameter, invalid_value or invalid_type, and its param.",
    "B7": "An unsupported endpoint is a 400 that lists the supported ones.",
    "B8": "GET /v1/batches/{id} returns the Batch object; an unknown id is a 404. Batches cannot be deleted.",
    "S1": "A batch goes from validating to failed, or through in_progress and finalizing to completed, and each step "
    "sets its time.",
    "S2": "If all rows fail, the batch is completed, with an error file and no output file.",
    "S3": "A batch that failed at validation has failed_at, errors, and no files.",
    "S4": "An input file that does not exist fails the batch, not its creation: invalid_request, param file_id.",
    "S5": "A cancelled batch has cancelling_at and cancelled_at, and delivers the results so far.",
    "V1": "errors is a list object whose data has code, message, param and line, for every bad line at once.",
    "V2": "Each kind of bad line has a specific code.",
    "V3": "duplicate_custom_id, model_mismatch, invalid_method and empty_file are reported (one source).",
    "V4": "A batch has at most 50,000 requests.",
    "V5": "A byte order mark, CRLF, blank lines and a missing last line break are accepted.",
    "C1": "POST /v1/batches/{id}/cancel returns the batch, cancelling or cancelled; a second cancel does too.",
    "C2": "Cancelling a completed or failed batch is a 409 that names its status, with x-should-retry: false.",
    "O1": "A line of the output file is {id, custom_id, response: {status_code, request_id, body}, error: null}.",
    "O2": "A failed row is in the error file, with its status and body.error.",
    "O3": "Each request has exactly one line, in one of the two files.",
    "O4": "Output and error files have purpose batch_output and the expiry that the batch requested.",
    "O5": "The body of a response is the endpoint's own response.",
    "N1": "request_counts has total, completed and failed; rows that never ran do not count as failed.",
    "N2": "usage has input_tokens, output_tokens, both details and total_tokens.",
    "R1": "The official clients retry a creation without an idempotency key: a retry must not make a second batch.",
    "R2": "Two creations that are not retries make two batches.",
    "M1": "GET /v1/models and GET /v1/models/{id} return the models; an unknown one is a 404.",
    "E1": "Every error is {error: {message, type, param, code}}, also for an unknown path or method.",
    "E2": "The official clients raise the error class of the status, with code, param, type and request id.",
    "E3": "Every response has an x-request-id.",
    "A1": "A wrong API key is a 401 with code invalid_api_key, a missing one a 401 with code null.",
    "A2": "OpenAI-Organization and OpenAI-Project are accepted.",
    "A3": "Files and batches of another project are a 404 and are not listed.",
    "J1": "The official Node client uploads, creates, waits, downloads, pages, and raises its own error classes.",
    "X1": "Results are in the order of the input.",
    "X2": "Creations with the same Idempotency-Key make one batch.",
    "X3": "x_cloister reports a batch's progress.",
    "X4": "Results can be read while the batch runs.",
    "X5": "A batch's progress is available as server-sent events, and a stream can be resumed.",
    "X6": "Errors are complete, and state a remedy.",
}
