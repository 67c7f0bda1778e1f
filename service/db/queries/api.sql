-- What the API, the API keys and the projects ask of the database.

-- name: insert_project
INSERT INTO projects (id, name) VALUES (%(id)s, %(name)s)

-- name: ensure_project
INSERT INTO projects (id, name) VALUES (%(id)s, %(name)s)
ON CONFLICT (name) DO UPDATE SET name = EXCLUDED.name  -- changes nothing, but makes RETURNING give the row
RETURNING id, name

-- name: insert_api_key
INSERT INTO api_keys (id, project_id, name, key_sha256, hint, expires_at)
VALUES (%(id)s, %(project_id)s, %(name)s, %(key_sha256)s, %(hint)s, %(expires_at)s)

-- name: api_keys_by_digest
SELECT api_keys.id, key_sha256, scopes, project_id, projects.name AS project_name
FROM api_keys JOIN projects ON projects.id = api_keys.project_id
WHERE substr(key_sha256, 1, 8) = substr(%(key_sha256)s::bytea, 1, 8)
  AND revoked_at IS NULL
  AND (expires_at IS NULL OR expires_at > now())
  AND archived_at IS NULL

-- name: check_schema
SELECT FROM batches LIMIT 1

-- name: insert_file
INSERT INTO files (id, project_id, purpose, filename, size_bytes, sha256, expires_at)
VALUES (%(id)s, %(project_id)s, %(purpose)s, %(filename)s, %(size_bytes)s, %(sha256)s,
        now() + make_interval(secs => %(expires_after_s)s))
RETURNING *

-- name: file_by_id
SELECT * FROM files
WHERE id = %(id)s AND project_id = %(project_id)s
  AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > now())

-- name: file_cursor
-- A deleted file is still a cursor: a client that deletes while it pages gets every file.
SELECT seq FROM files WHERE id = %(id)s AND project_id = %(project_id)s

-- name: list_files_desc
SELECT * FROM files
WHERE project_id = %(project_id)s
  AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > now())
  AND (%(purpose)s::text IS NULL OR purpose = %(purpose)s)
  AND (%(cursor)s::bigint IS NULL OR seq < %(cursor)s)
ORDER BY seq DESC
LIMIT %(limit)s

-- name: list_files_asc
SELECT * FROM files
WHERE project_id = %(project_id)s
  AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > now())
  AND (%(purpose)s::text IS NULL OR purpose = %(purpose)s)
  AND (%(cursor)s::bigint IS NULL OR seq > %(cursor)s)
ORDER BY seq
LIMIT %(limit)s

-- name: delete_file
UPDATE files SET deleted_at = now()
WHERE id = %(id)s AND project_id = %(project_id)s AND deleted_at IS NULL
RETURNING id

-- name: lock_batch_request
-- Creations of the same request wait for each other, so that a retry sees the batch of the first attempt.
SELECT pg_advisory_xact_lock(hashtextextended(%(project_id)s || encode(%(request_sha256)s, 'hex'), 0))

-- name: batch_by_request
SELECT batches.*,
       (SELECT jsonb_agg(to_jsonb(e) ORDER BY e.ordinal) FROM batch_errors e WHERE e.batch_id = batches.id) AS errors
FROM batches
WHERE project_id = %(project_id)s AND request_sha256 = %(request_sha256)s
  AND created_at > now() - make_interval(secs => %(window_s)s)
ORDER BY created_at DESC
LIMIT 1

-- name: insert_batch
WITH created AS (
    INSERT INTO batches (id, project_id, endpoint, input_file_id, completion_window, metadata,
                         output_expires_after_s, request_sha256, expires_at)
    VALUES (%(id)s, %(project_id)s, %(endpoint)s, %(input_file_id)s, %(completion_window)s, %(metadata)s,
            %(output_expires_after_s)s, %(request_sha256)s, now() + make_interval(secs => %(completion_window_s)s))
    RETURNING *
), event AS (
    INSERT INTO batch_events (batch_id, type) SELECT id, 'batch.validating' FROM created
)
SELECT * FROM created

-- name: batch_by_id
SELECT batches.*,
       (SELECT jsonb_agg(to_jsonb(e) ORDER BY e.ordinal) FROM batch_errors e WHERE e.batch_id = batches.id) AS errors
FROM batches
WHERE id = %(id)s AND project_id = %(project_id)s

-- name: batch_cursor
SELECT seq FROM batches WHERE id = %(id)s AND project_id = %(project_id)s

-- name: list_batches
SELECT batches.*,
       (SELECT jsonb_agg(to_jsonb(e) ORDER BY e.ordinal) FROM batch_errors e WHERE e.batch_id = batches.id) AS errors
FROM batches
WHERE project_id = %(project_id)s AND (%(cursor)s::bigint IS NULL OR seq < %(cursor)s)
ORDER BY seq DESC
LIMIT %(limit)s

-- name: cancel_batch
WITH cancelled AS (
    UPDATE batches SET status = 'cancelling', cancelling_at = now()
    WHERE id = %(id)s AND project_id = %(project_id)s AND status IN ('validating', 'in_progress', 'finalizing')
    RETURNING *
), event AS (
    INSERT INTO batch_events (batch_id, type) SELECT id, 'batch.cancelling' FROM cancelled
)
SELECT * FROM cancelled
