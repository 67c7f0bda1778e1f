-- What the reconciler reads and writes. Each change of a batch names the state it starts from, so that a cancel or
-- another reconciler that came first is never overwritten.

-- name: batches_to_advance
-- The batches that a step may take further now; those that wait for their turn or for a while are not among them.
-- Jobs come first: to look at one is quick, and there are never many. Among the others the projects take turns, so
-- that one that created thousands of batches does not make another's first wait for all of them.
WITH free AS (
    SELECT %(max_running_jobs)s - count(*) AS slots FROM batches
    WHERE status IN ('in_progress', 'cancelling') AND attempt > 0 AND launch_after IS NULL
), candidates AS (
    SELECT id, project_id, seq,
           status IN ('in_progress', 'cancelling') AND attempt > 0 AND launch_after IS NULL AS has_job
    FROM batches
    WHERE parts_deleted_at IS NULL
      AND (status <> 'in_progress' OR launch_after IS NULL OR expires_at <= now())
    UNION ALL
    SELECT id, project_id, seq, true
    FROM launch_queue
    WHERE position <= (SELECT slots FROM free)
)
SELECT id FROM candidates
WHERE id <> ALL (%(busy)s)
GROUP BY id, project_id, seq
ORDER BY NOT bool_or(has_job), row_number() OVER (PARTITION BY project_id, NOT bool_or(has_job) ORDER BY seq), seq
LIMIT %(limit)s

-- name: is_any_batch_open
SELECT EXISTS (SELECT FROM batches WHERE parts_deleted_at IS NULL) AS is_so

-- name: batch_to_reconcile
SELECT id, project_id, endpoint, input_file_id, output_expires_after_s, status, model, expires_at, cancelling_at,
       finalizing_at, total, attempt, failed_attempts, committed_parts, launch_after, created_at, job_running_since,
       completed + failed + committed_parts > 0 AS has_results,
       launch_refused_at, giving_up_at, giving_up_code, giving_up_message
FROM batches WHERE id = %(batch_id)s

-- name: beat
INSERT INTO reconciler_heartbeat (leader, beat_at) VALUES (%(leader)s, now())
ON CONFLICT (only_row) DO UPDATE SET leader = EXCLUDED.leader, beat_at = EXCLUDED.beat_at

-- name: input_file_of_batch
SELECT id, purpose, deleted_at, expires_at FROM files WHERE id = %(file_id)s AND project_id = %(project_id)s

-- name: accept_batch
UPDATE batches
SET status = 'in_progress', model = %(model)s, total = %(total)s, enqueued_requests = %(total)s,
    in_progress_at = %(now)s, attempt = 1, launch_after = %(now)s
WHERE id = %(batch_id)s AND status = 'validating'
RETURNING id

-- name: refuse_batch
UPDATE batches SET status = 'failed', failed_at = %(now)s, error_count = %(error_count)s
WHERE id = %(batch_id)s AND status = 'validating'
RETURNING id

-- name: insert_batch_error
INSERT INTO batch_errors (batch_id, ordinal, code, message, param, line)
VALUES (%(batch_id)s, %(ordinal)s, %(code)s, %(message)s, %(param)s, %(line)s)

-- name: lock_launches
-- Held from the look at the running jobs until one more is noted, also against another reconciler.
SELECT pg_advisory_xact_lock(%(lock)s)

-- name: may_launch
-- The queue is put in order only where there is a slot: thousands may ask in vain.
WITH free AS (
    SELECT %(max_running_jobs)s - count(*) AS slots FROM batches
    WHERE status IN ('in_progress', 'cancelling') AND attempt > 0 AND launch_after IS NULL
)
SELECT CASE WHEN slots > 0 THEN (SELECT position <= slots FROM launch_queue WHERE id = %(batch_id)s) END AS may_launch
FROM free

-- name: job_was_launched
WITH launched AS (
    UPDATE batches SET launch_after = NULL, launch_refused_at = NULL, gpus = %(gpus)s
    WHERE id = %(batch_id)s AND attempt = %(attempt)s AND status IN ('in_progress', 'cancelling')
        AND launch_after IS NOT NULL
    RETURNING id, project_id, model
), counted AS (
    INSERT INTO usage_totals AS totals (project_id, model, jobs_launched) SELECT project_id, model, 1 FROM launched
    ON CONFLICT (project_id, model) DO UPDATE SET jobs_launched = totals.jobs_launched + 1
), turn AS (
    -- Not now(): the transaction began before it had waited for the lock.
    UPDATE projects SET last_launch_at = clock_timestamp() FROM launched WHERE projects.id = project_id
)
SELECT id FROM launched

-- name: postpone_launch
UPDATE batches
SET launch_after = %(launch_after)s,
    launch_refused_at = CASE WHEN %(refused)s THEN coalesce(launch_refused_at, %(now)s) END
WHERE id = %(batch_id)s AND attempt = %(attempt)s AND launch_after IS NOT NULL

-- name: job_runs
UPDATE batches SET job_running_since = %(now)s
WHERE id = %(batch_id)s AND attempt = %(attempt)s AND status IN ('in_progress', 'cancelling')
    AND job_running_since IS NULL
RETURNING id

-- name: job_is_over
UPDATE batches
SET gpu_seconds = gpu_seconds + gpus * greatest(extract(epoch FROM %(now)s - job_running_since), 0),
    job_running_since = NULL
WHERE id = %(batch_id)s AND attempt = %(attempt)s AND job_running_since IS NOT NULL

-- name: next_attempt
UPDATE batches
SET attempt = attempt + 1, launch_after = %(launch_after)s, failed_attempts = %(failed_attempts)s,
    committed_parts = %(committed_parts)s, rows_per_s = NULL, progress_at = NULL
WHERE id = %(batch_id)s AND attempt = %(attempt)s AND status = 'in_progress' AND giving_up_at IS NULL
RETURNING id

-- name: give_up_batch
-- A launch that was still due is not: where it was done and not noted, its job is stopped like any other.
UPDATE batches
SET giving_up_at = %(now)s, giving_up_code = %(code)s, giving_up_message = %(message)s, launch_after = NULL
WHERE id = %(batch_id)s AND attempt = %(attempt)s AND status = 'in_progress' AND giving_up_at IS NULL
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
SELECT %(id)s, id, 'batch_output', %(filename)s, %(size_bytes)s, %(sha256)s, %(now)s,
       %(now)s + make_interval(secs => coalesce(%(expires_after_s)s, retention_s, %(retention_s)s))
FROM projects WHERE id = %(project_id)s

-- name: parts_were_deleted
UPDATE batches SET parts_deleted_at = %(now)s
WHERE id = %(batch_id)s AND status IN ('failed', 'completed', 'expired', 'cancelled')

-- name: batch_waits
-- Why it waits may change with every node that comes or goes, and is not told anew before ten minutes have passed.
INSERT INTO batch_events (batch_id, at, type, data)
SELECT %(batch_id)s, %(now)s, %(type)s, jsonb_build_object('job_id', %(job_id)s::text, 'reason', %(reason)s::text)
WHERE NOT EXISTS (
    SELECT FROM (
        SELECT at, data ->> 'reason' AS reason FROM batch_events
        WHERE batch_id = %(batch_id)s AND type = %(type)s AND data ->> 'job_id' = %(job_id)s
        ORDER BY id DESC LIMIT 1
    ) AS told
    WHERE reason = %(reason)s OR at > %(now)s - interval '10 min'
)

-- name: insert_batch_event
INSERT INTO batch_events (batch_id, at, type, data) VALUES (%(batch_id)s, %(now)s, %(type)s, %(data)s)
