-- What the reconciler reads and writes. Each change of a batch names the state it starts from, so that a cancel or
-- another reconciler that came first is never overwritten.

-- name: batches_to_reconcile
SELECT id FROM batches WHERE parts_deleted_at IS NULL ORDER BY seq

-- name: batch_to_reconcile
SELECT id, project_id, endpoint, input_file_id, output_expires_after_s, status, model, expires_at, finalizing_at,
       total, attempt, failed_attempts, committed_parts, launch_after
FROM batches WHERE id = %(batch_id)s

-- name: input_file_of_batch
SELECT id, purpose, deleted_at, expires_at FROM files WHERE id = %(file_id)s AND project_id = %(project_id)s

-- name: accept_batch
UPDATE batches
SET status = 'in_progress', model = %(model)s, total = %(total)s, in_progress_at = %(now)s,
    attempt = 1, launch_after = %(now)s
WHERE id = %(batch_id)s AND status = 'validating'
RETURNING id

-- name: refuse_batch
UPDATE batches SET status = 'failed', failed_at = %(now)s, error_count = %(error_count)s
WHERE id = %(batch_id)s AND status = 'validating'
RETURNING id

-- name: insert_batch_error
INSERT INTO batch_errors (batch_id, ordinal, code, message, param, line)
VALUES (%(batch_id)s, %(ordinal)s, %(code)s, %(message)s, %(param)s, %(line)s)

-- name: count_launched_jobs
SELECT count(*) AS jobs FROM batches
WHERE status IN ('in_progress', 'cancelling') AND attempt > 0 AND launch_after IS NULL AND id <> %(batch_id)s

-- name: job_was_launched
UPDATE batches SET launch_after = NULL
WHERE id = %(batch_id)s AND attempt = %(attempt)s AND status IN ('in_progress', 'cancelling')
    AND launch_after IS NOT NULL
RETURNING id

-- name: next_attempt
UPDATE batches
SET attempt = attempt + 1, launch_after = %(launch_after)s, failed_attempts = %(failed_attempts)s,
    committed_parts = %(committed_parts)s
WHERE id = %(batch_id)s AND attempt = %(attempt)s AND status = 'in_progress'
RETURNING id

-- name: finalize_batch
UPDATE batches SET status = 'finalizing', finalizing_at = %(now)s
WHERE id = %(batch_id)s AND status = 'in_progress'
RETURNING id

-- name: end_batch
UPDATE batches
SET status = %(after)s,
    output_file_id = %(output_file_id)s, error_file_id = %(error_file_id)s,
    completed = %(completed)s, failed = %(failed)s, error_count = %(error_count)s,
    input_tokens = %(input_tokens)s, cached_tokens = %(cached_tokens)s,
    output_tokens = %(output_tokens)s, reasoning_tokens = %(reasoning_tokens)s,
    completed_at = CASE WHEN %(after)s = 'completed' THEN %(now)s ELSE completed_at END,
    expired_at = CASE WHEN %(after)s = 'expired' THEN %(now)s ELSE expired_at END,
    cancelled_at = CASE WHEN %(after)s = 'cancelled' THEN %(now)s ELSE cancelled_at END,
    failed_at = CASE WHEN %(after)s = 'failed' THEN %(now)s ELSE failed_at END
WHERE id = %(batch_id)s AND status = %(before)s
RETURNING id

-- name: insert_batch_file
INSERT INTO files (id, project_id, purpose, filename, size_bytes, sha256, created_at, expires_at)
VALUES (%(id)s, %(project_id)s, 'batch_output', %(filename)s, %(size_bytes)s, %(sha256)s, %(now)s, %(expires_at)s)

-- name: parts_were_deleted
UPDATE batches SET parts_deleted_at = %(now)s
WHERE id = %(batch_id)s AND status IN ('failed', 'completed', 'expired', 'cancelled')

-- name: insert_batch_event
INSERT INTO batch_events (batch_id, at, type, data) VALUES (%(batch_id)s, %(now)s, %(type)s, %(data)s)
