"""What the suite holds a server to: the areas of the table, and the points of the contract that its checks cite.

Sources: OpenAI's API reference (https://platform.openai.com/docs/api-reference/files, …/batch and …/models), its guide
(https://platform.openai.com/docs/guides/batch), the official clients, and what its API was seen to answer. A point that
ends with "(one source)" was not confirmed by a second one.
"""

from typing import Final

# The stem of each module of checks → its name in the table, in the table's order.
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
    "U1": "POST /v1/files takes a multipart form with file and purpose and answers with a File object: id, object, "
    "bytes, created_at, expires_at, filename, purpose, status.",
    "U2": "expires_after[anchor] is created_at, expires_after[seconds] is from 3600 to 2592000.",
    "U3": "A file of purpose batch expires after 30 days unless the upload says otherwise.",
    "U4": "A batch input has at most 200 MB.",
    "U5": "A file of purpose batch that is plainly no JSONL is refused at upload, or fails its batch.",
    "F1": "GET /v1/files/{id} gives the File object; an unknown id is a 404.",
    "F2": "GET /v1/files/{id}/content gives the bytes that were uploaded.",
    "F3": 'DELETE /v1/files/{id} answers {id, object: "file", deleted: true}; the file is gone then.',
    "L1": 'A listing has object "list", data, first_id, last_id and has_more.',
    "L2": "GET /v1/files takes purpose, limit from 1 to 10000 and order asc or desc; the newest come first.",
    "L3": "after is the id of an object; no object is dropped or told twice, not even among those of one second.",
    "L4": "GET /v1/batches takes limit up to 100, by default 20; over 100 is integer_above_max_value, 0 an empty list, "
    "below 0 integer_below_min_value.",
    "L5": "The official clients page with after=data[-1].id and stop at an empty page.",
    "B1": "POST /v1/batches takes input_file_id, endpoint, completion_window, metadata and output_expires_after, and "
    "answers 200 with a Batch object.",
    "B2": "A Batch object has id, object, endpoint, input_file_id, completion_window, status and created_at; its times "
    "are Unix seconds.",
    "B3": 'completion_window is "24h" and nothing else.',
    "B4": "metadata has at most 16 pairs, keys of at most 64 and values of at most 512 characters.",
    "B5": "output_expires_after has anchor created_at and seconds from 3600 to 2592000.",
    "B6": "A wrong creation is a 400 with missing_required_parameter, invalid_value or invalid_type, and its param.",
    "B7": "An endpoint that a batch may not name is a 400 that lists those that it may.",
    "B8": "GET /v1/batches/{id} gives the Batch object; an unknown id is a 404. No batch can be deleted.",
    "S1": "A batch goes from validating to failed, or by in_progress and finalizing to completed, and each step leaves "
    "its time.",
    "S2": "If every row failed, the batch is completed all the same, with an error file and no output file.",
    "S3": "A batch that failed at validation has failed_at, errors, and no files.",
    "S4": "An input file that does not exist fails the batch, not its creation: invalid_request, param file_id.",
    "S5": "A batch that was cancelled has cancelling_at and cancelled_at, and hands over what it got.",
    "V1": "errors is a list object whose data has code, message, param and line, for every bad line at once.",
    "V2": "Each kind of bad line has its code.",
    "V3": "duplicate_custom_id, model_mismatch, invalid_method and empty_file are told (one source).",
    "V4": "A batch has at most 50,000 requests.",
    "V5": "A byte order mark, CRLF, blank lines and a missing last line break are no errors.",
    "C1": "POST /v1/batches/{id}/cancel answers with the batch, cancelling or cancelled; again, the same.",
    "C2": "The cancel of a batch that completed or failed is a 409 that says its status, with x-should-retry: false.",
    "O1": "A line of the output file is {id, custom_id, response: {status_code, request_id, body}, error: null}.",
    "O2": "A row that failed stands in the error file, with its status and body.error.",
    "O3": "Each request has exactly one line, in one of both files.",
    "O4": "Output and error file are files of purpose batch_output, with the expiry that the batch asked for.",
    "O5": "A response's body is what the endpoint itself answers.",
    "N1": "request_counts are total, completed and failed; rows that never ran are not failed.",
    "N2": "usage has input_tokens, output_tokens, both details and total_tokens.",
    "R1": "The official clients repeat a creation without an idempotency key: it must not make a second batch.",
    "R2": "Two creations that are no repetition make two batches.",
    "M1": "GET /v1/models and GET /v1/models/{id} tell the models; an unknown one is a 404.",
    "E1": "Every error is {error: {message, type, param, code}}, also where the path or the method is wrong.",
    "E2": "The official clients raise the class of the status, with code, param, type and request id.",
    "E3": "Every answer has an x-request-id.",
    "A1": "A wrong API key is a 401 with code invalid_api_key, a missing one a 401 with code null.",
    "A2": "OpenAI-Organization and OpenAI-Project are accepted.",
    "A3": "Files and batches of another project are not there: 404, and in no listing.",
    "J1": "The official Node client uploads, creates, waits, downloads, pages, and raises its own error classes.",
    "X1": "Results stand in the order of the input.",
    "X2": "Creations with the same Idempotency-Key make one batch.",
    "X3": "A batch tells its progress in x_cloister.",
    "X4": "Results can be read while the batch runs.",
    "X5": "A batch's progress can be followed as server-sent events and taken up again.",
    "X6": "What is wrong is told in full, and with what to do.",
}
