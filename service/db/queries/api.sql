-- Reads and writes of the API.

-- name: lock_project
-- Serializes all changes of a project's use, so that two concurrent requests cannot both take the last room.
SELECT retention_s, max_batches_in_progress, max_enqueued_requests, max_enqueued_tokens, max_stored_bytes
FROM projects WHERE id = %(id)s
FOR NO KEY UPDATE

-- name: project_settings
-- Everything in the object store counts, including expired files and deleted files that a running batch reads.
SELECT retention_s, max_batches_in_progress, max_enqueued_requests, max_enqueued_tokens, max_stored_bytes,
       CASE WHEN max_stored_bytes IS NOT NULL THEN (
           SELECT coalesce(sum(size_bytes), 0)::bigint FROM files WHERE project_id = projects.id
       ) END AS stored_bytes
FROM projects WHERE id = %(id)s

-- name: open_batches
SELECT count(*) AS batches,
       coalesce(sum(enqueued_requests), 0)::bigint AS requests,
       coalesce(sum(enqueued_tokens), 0)::bigint AS tokens,
       (min(CASE WHEN status IN ('finalizing', 'cancelling') THEN 0
                 WHEN rows_per_s > 0 THEN (total - completed - failed) / rows_per_s END))::double precision
           AS soonest_end_s
FROM batches
WHERE project_id = %(project_id)s AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')

-- name: check_schema
SELECT FROM batches LIMIT 1

-- name: insert_file
-- Not now(), the start of the transaction: it may have waited for another transaction that took the lower seq.
WITH moment AS (SELECT clock_timestamp() AS at)
, created AS (
    INSERT INTO files (id, project_id, purpose, filename, size_bytes, sha256, line_count, created_at, expires_at)
    VALUES (%(id)s, %(project_id)s, %(purpose)s, %(filename)s, %(size_bytes)s, %(sha256)s, %(line_count)s,
            (SELECT at FROM moment), (SELECT at FROM moment) + make_interval(secs => %(expires_after_s)s))
    RETURNING *
), noted AS (
    INSERT INTO audit_log (project_id, actor, client_address, request_id, type, object_id, size_bytes, sha256, data)
    SELECT project_id, %(actor)s, %(client_address)s, %(request_id)s, 'file.created', id, size_bytes, sha256,
           jsonb_build_object('purpose', purpose)
    FROM created
)
SELECT * FROM created

-- name: inserted_file
SELECT * FROM files WHERE id = %(id)s

-- name: file_by_id
SELECT * FROM files
WHERE id = %(id)s AND project_id = %(project_id)s
  AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > now())

-- name: read_file
-- The row of a file whose content is about to be sent, which the audit log records.
WITH found AS (
    SELECT * FROM files
    WHERE id = %(id)s AND project_id = %(project_id)s
      AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > now())
), noted AS (
    INSERT INTO audit_log (project_id, actor, client_address, request_id, type, object_id, size_bytes, sha256)
    SELECT project_id, %(actor)s, %(client_address)s, %(request_id)s, 'file.downloaded', id, size_bytes, sha256
    FROM found
)
SELECT * FROM found

-- name: file_cursor
-- A deleted file is still a cursor, so that a client that deletes files while paging gets every file.
SELECT seq FROM files WHERE id = %(id)s AND project_id = %(project_id)s
UNION ALL
SELECT object_seq FROM audit_log
WHERE object_id = %(id)s AND project_id = %(project_id)s AND type = 'file.deleted'
LIMIT 1

-- name: read_in_index_order
-- Runs before a page of a listing. Pages compare pairs (project_id, seq), whose order only the index on both has. With
-- outdated statistics, Postgres would sort a whole project instead of following this index.
SET LOCAL enable_sort = off; SET LOCAL enable_incremental_sort = off; SET LOCAL enable_bitmapscan = off

-- name: list_files_desc
SELECT * FROM files
WHERE (project_id, seq) < (%(project_id)s, %(cursor)s) AND (project_id, seq) > (%(project_id)s, 0)
  AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > now())
  AND (%(purpose)s::text IS NULL OR purpose = %(purpose)s)
ORDER BY project_id DESC, seq DESC
LIMIT %(limit)s

-- name: list_files_asc
SELECT * FROM files
WHERE (project_id, seq) > (%(project_id)s, %(cursor)s) AND (project_id, seq) < (%(project_id)s, %(newest)s)
  AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > now())
  AND (%(purpose)s::text IS NULL OR purpose = %(purpose)s)
ORDER BY project_id, seq
LIMIT %(limit)s

-- name: lock_file_to_delete
SELECT id FROM files
WHERE id = %(id)s AND project_id = %(project_id)s
  AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > now())
FOR UPDATE

-- name: file_is_in_use
-- As the input file of a batch, or as an image of its lines.
SELECT EXISTS (
    SELECT FROM batches
    WHERE input_file_id = %(id)s AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
      AND project_id = %(project_id)s
) OR EXISTS (
    SELECT FROM segments JOIN batches ON batches.id = batch_id
    WHERE files <> '{}' AND files @> ARRAY[%(id)s::text]
      AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling') AND project_id = %(project_id)s
) AS in_use

-- name: hide_file
-- The entry has the request; the content may be deleted later, by the reconciler.
WITH hidden AS (
    UPDATE files SET deleted_at = now(), deleted_by = %(actor)s WHERE id = %(id)s RETURNING id, project_id
)
INSERT INTO audit_log (project_id, actor, client_address, request_id, type, object_id)
SELECT project_id, %(actor)s, %(client_address)s, %(request_id)s, 'file.deletion_requested', id FROM hidden

-- name: remove_file
-- Runs after the object was deleted. Of two concurrent runs, one adds an audit log entry.
WITH removed AS (
    DELETE FROM files WHERE id = %(id)s RETURNING *
)
INSERT INTO audit_log (project_id, actor, client_address, request_id, type, object_id, object_seq, size_bytes, sha256,
                       data)
SELECT project_id, %(actor)s, %(client_address)s, %(request_id)s, 'file.deleted', id, seq, size_bytes, sha256,
       jsonb_build_object('purpose', purpose, 'created_at', floor(extract(epoch FROM created_at))::bigint,
                          'reason', %(reason)s::text)
FROM removed
RETURNING object_id, project_id, size_bytes, sha256

-- name: input_of_new_batch
-- Makes a concurrent deletion wait until it can see the batch. A missing file takes nothing of the limits.
SELECT * FROM files
WHERE id = %(input_file_id)s AND project_id = %(project_id)s
  AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > now())
FOR KEY SHARE

-- name: batch_by_request
SELECT batches.*,
       (SELECT jsonb_agg(to_jsonb(e) ORDER BY e.ordinal) FROM batch_errors e WHERE e.batch_id = batches.id) AS errors
FROM batches
WHERE project_id = %(project_id)s AND request_sha256 = %(request_sha256)s
  AND created_at > now() - make_interval(secs => %(window_s)s)
  AND created_at > coalesce(
      (SELECT refused_at FROM refused_creations
       WHERE project_id = %(project_id)s AND request_sha256 = %(request_sha256)s), '-infinity')
ORDER BY created_at DESC
LIMIT 1

-- name: note_refused_creation
WITH outdated AS (
    DELETE FROM refused_creations
    WHERE project_id = %(project_id)s AND request_sha256 <> %(request_sha256)s
      AND refused_at <= now() - make_interval(secs => %(window_s)s)
)
INSERT INTO refused_creations (project_id, request_sha256, refused_at)
VALUES (%(project_id)s, %(request_sha256)s, clock_timestamp())
ON CONFLICT (project_id, request_sha256) DO UPDATE SET refused_at = EXCLUDED.refused_at

-- name: batch_by_idempotency_key
SELECT batches.*,
       (SELECT jsonb_agg(to_jsonb(e) ORDER BY e.ordinal) FROM batch_errors e WHERE e.batch_id = batches.id) AS errors
FROM batches
WHERE project_id = %(project_id)s AND idempotency_key = %(idempotency_key)s

-- name: insert_batch
-- Not now(): the transaction waited for the lock on the project, and another one may have taken the lower seq.
WITH moment AS (
    SELECT clock_timestamp() AS at
), created AS (
    INSERT INTO batches (id, project_id, endpoint, input_file_id, completion_window, metadata,
                         output_expires_after_s, request_sha256, idempotency_key, enqueued_requests, enqueued_tokens,
                         priority, created_at, expires_at)
    VALUES (%(id)s, %(project_id)s, %(endpoint)s, %(input_file_id)s, %(completion_window)s, %(metadata)s,
            %(output_expires_after_s)s, %(request_sha256)s, %(idempotency_key)s, %(enqueued_requests)s,
            %(enqueued_tokens)s, %(priority)s, (SELECT at FROM moment),
            (SELECT at FROM moment) + make_interval(secs => %(completion_window_s)s))
    RETURNING *
), event AS (
    INSERT INTO batch_events (batch_id, type) SELECT id, 'batch.validating' FROM created
), noted AS (
    INSERT INTO audit_log (project_id, actor, client_address, request_id, type, object_id, data)
    SELECT project_id, %(actor)s, %(client_address)s, %(request_id)s, 'batch.created', id,
           jsonb_build_object('endpoint', endpoint, 'input_file_id', %(audited_file_id)s::text, 'priority', priority)
    FROM created
)
SELECT * FROM created

-- name: batch_by_id
SELECT batches.*,
       (SELECT jsonb_agg(to_jsonb(e) ORDER BY e.ordinal) FROM batch_errors e WHERE e.batch_id = batches.id) AS errors
FROM batches
WHERE id = %(id)s AND project_id = %(project_id)s

-- name: batch_cursor
SELECT seq FROM batches WHERE id = %(id)s AND project_id = %(project_id)s
UNION ALL
SELECT object_seq FROM audit_log
WHERE object_id = %(id)s AND project_id = %(project_id)s AND type = 'batch.deleted'
LIMIT 1

-- name: list_batches
SELECT batches.*,
       (SELECT jsonb_agg(to_jsonb(e) ORDER BY e.ordinal) FROM batch_errors e WHERE e.batch_id = batches.id) AS errors
FROM batches
WHERE (project_id, seq) < (%(project_id)s, %(cursor)s) AND (project_id, seq) > (%(project_id)s, 0)
ORDER BY project_id DESC, seq DESC
LIMIT %(limit)s

-- name: cancel_batch
WITH cancelled AS (
    UPDATE batches SET status = 'cancelling', cancelling_at = now()
    WHERE id = %(id)s AND project_id = %(project_id)s AND status IN ('validating', 'in_progress', 'finalizing')
    RETURNING *
), event AS (
    INSERT INTO batch_events (batch_id, type) SELECT id, 'batch.cancelling' FROM cancelled
), noted AS (
    INSERT INTO audit_log (project_id, actor, client_address, request_id, type, object_id)
    SELECT project_id, %(actor)s, %(client_address)s, %(request_id)s, 'batch.cancelled', id FROM cancelled
)
SELECT * FROM cancelled

-- name: pause_batch
-- A second pause changes nothing.
WITH paused AS (
    UPDATE batches
    SET paused_at = now()
    WHERE id = %(id)s AND project_id = %(project_id)s AND status IN ('validating', 'in_progress')
      AND paused_at IS NULL
    RETURNING id, project_id
), noted AS (
    INSERT INTO audit_log (project_id, actor, client_address, request_id, type, object_id)
    SELECT project_id, %(actor)s, %(client_address)s, %(request_id)s, 'batch.paused', id FROM paused
)
INSERT INTO batch_events (batch_id, type) SELECT id, 'batch.paused' FROM paused

-- name: resume_batch
WITH resumed AS (
    UPDATE batches
    SET paused_at = NULL
    WHERE id = %(id)s AND project_id = %(project_id)s AND status IN ('validating', 'in_progress')
      AND paused_at IS NOT NULL
    RETURNING id, project_id
), noted AS (
    INSERT INTO audit_log (project_id, actor, client_address, request_id, type, object_id)
    SELECT project_id, %(actor)s, %(client_address)s, %(request_id)s, 'batch.resumed', id FROM resumed
)
INSERT INTO batch_events (batch_id, type) SELECT id, 'batch.resumed' FROM resumed

-- name: audit_cursor
SELECT seq FROM audit_log WHERE id = %(id)s AND project_id = %(project_id)s

-- name: list_audit_log_desc
SELECT audit_log.*, projects.name AS project_name
FROM audit_log LEFT JOIN projects ON projects.id = project_id
WHERE (project_id, audit_log.seq) < (%(project_id)s, %(below)s)
  AND (project_id, audit_log.seq) > (%(project_id)s, %(above)s)
  AND (%(event_types)s::text[] IS NULL OR type = ANY (%(event_types)s))
  AND (%(actor_ids)s::text[] IS NULL OR actor = ANY (%(actor_ids)s))
  AND (%(resource_ids)s::text[] IS NULL OR object_id = ANY (%(resource_ids)s))
  AND (%(project_ids)s::text[] IS NULL OR project_id = ANY (%(project_ids)s))
  AND extract(epoch FROM at) >= %(from_s)s AND extract(epoch FROM at) < %(to_s)s
ORDER BY project_id DESC, audit_log.seq DESC
LIMIT %(limit)s

-- name: list_audit_log_asc
SELECT audit_log.*, projects.name AS project_name
FROM audit_log LEFT JOIN projects ON projects.id = project_id
WHERE (project_id, audit_log.seq) < (%(project_id)s, %(below)s)
  AND (project_id, audit_log.seq) > (%(project_id)s, %(above)s)
  AND (%(event_types)s::text[] IS NULL OR type = ANY (%(event_types)s))
  AND (%(actor_ids)s::text[] IS NULL OR actor = ANY (%(actor_ids)s))
  AND (%(resource_ids)s::text[] IS NULL OR object_id = ANY (%(resource_ids)s))
  AND (%(project_ids)s::text[] IS NULL OR project_id = ANY (%(project_ids)s))
  AND extract(epoch FROM at) >= %(from_s)s AND extract(epoch FROM at) < %(to_s)s
ORDER BY project_id, audit_log.seq
LIMIT %(limit)s
