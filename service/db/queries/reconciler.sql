-- Reads and writes of the reconciler. Each change of a batch names the state that it starts from, so that it never
-- overwrites a cancel or the change of another reconciler.

-- name: batches_to_advance
-- Batches that a step can advance now. Batches that wait for their turn or for a pause are left out.
-- A validating or finalizing batch leaves its state with its step. Among these the projects take turns, so that a
-- project with thousands of new batches does not delay another's first. All others may need any number of steps, most
-- of which only look at a job. They take their steps in rotation, from the batch after the last one that had a step,
-- so that each gets its step however many there are. The two kinds alternate: neither can keep the other waiting.
WITH free AS (
    SELECT %(max_running_jobs)s - count(*) AS slots FROM running_jobs
), candidates AS (
    SELECT id, project_id, seq, status NOT IN ('validating', 'finalizing') AS in_rotation
    FROM batches
    WHERE parts_deleted_at IS NULL
      AND (status <> 'in_progress' OR launch_after IS NULL OR expires_at <= now())
      AND id <> ALL (%(excluded)s)
    UNION
    SELECT id, project_id, seq, true
    FROM launch_queue
    WHERE position <= (SELECT slots FROM free) AND id <> ALL (%(excluded)s)
), turns AS (
    SELECT id, seq, in_rotation,
           CASE WHEN in_rotation THEN (seq <= %(after_seq)s)::int
                ELSE row_number() OVER (PARTITION BY in_rotation, project_id ORDER BY seq) END AS turn
    FROM candidates
)
SELECT id, seq, in_rotation
FROM turns
ORDER BY row_number() OVER (PARTITION BY in_rotation ORDER BY turn, seq), in_rotation DESC
LIMIT %(limit)s

-- name: is_any_batch_open
SELECT EXISTS (SELECT FROM batches WHERE parts_deleted_at IS NULL) AS is_open

-- name: batch_to_reconcile
SELECT id, project_id, endpoint, input_file_id, output_expires_after_s, status, model, expires_at, cancelling_at,
       finalizing_at, total, attempt, failed_attempts, committed_parts, launch_after, created_at, job_running_since,
       completed + failed + committed_parts > 0 AS has_results, job_ending_since,
       progress_at IS NOT NULL AND completed + failed >= total AND misreported_attempt IS DISTINCT FROM attempt
           AS all_reported,
       launch_refused_at, giving_up_at, giving_up_code, giving_up_message, paused_at IS NOT NULL AS is_paused,
       paused_attempt IS NOT DISTINCT FROM attempt AS was_paused,
       (estimate ->> 'most_output')::bigint AS most_output,
       CASE WHEN (estimate ->> 'sampled_lines')::bigint = total
            THEN (estimate ->> 'input_tokens')::bigint END AS counted_tokens
FROM batches WHERE id = %(batch_id)s

-- name: beat
INSERT INTO reconciler_heartbeat (leader, beat_at) VALUES (%(leader)s, now())
ON CONFLICT (only_row) DO UPDATE SET leader = EXCLUDED.leader, beat_at = EXCLUDED.beat_at

-- name: input_file_of_batch
SELECT id, purpose, size_bytes, line_count, deleted_at, expires_at FROM files WHERE id = %(file_id)s AND project_id = %(project_id)s

-- name: accept_batch
UPDATE batches
SET status = 'in_progress', model = %(model)s, total = %(total)s, enqueued_requests = %(total)s,
    in_progress_at = %(now)s, attempt = 1, launch_after = %(now)s, estimate = %(estimate)s
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
-- Held from the check of the running jobs until the launch is recorded, also against another reconciler.
SELECT pg_advisory_xact_lock(%(lock)s)

-- name: may_launch
-- Sorts the queue only if a slot is free, because most batches of a long queue find none.
WITH free AS (
    SELECT %(max_running_jobs)s - count(*) AS slots FROM running_jobs
)
SELECT CASE WHEN slots > 0 THEN (SELECT position <= slots FROM launch_queue WHERE id = %(batch_id)s) END AS may_launch
FROM free

-- name: record_launch
WITH launched AS (
    UPDATE batches SET launch_after = NULL, launch_refused_at = NULL, gpus = %(gpus)s
    WHERE id = %(batch_id)s AND attempt = %(attempt)s AND status IN ('in_progress', 'cancelling')
        AND launch_after IS NOT NULL
    RETURNING id, project_id, model
), counted AS (
    INSERT INTO usage_totals AS totals (project_id, model, jobs_launched) SELECT project_id, model, 1 FROM launched
    ON CONFLICT (project_id, model) DO UPDATE SET jobs_launched = totals.jobs_launched + 1
), turn AS (
    -- Not now(), which is the start of the transaction, before it waited for the lock.
    UPDATE projects SET last_launch_at = clock_timestamp() FROM launched WHERE projects.id = project_id
)
SELECT id FROM launched

-- name: postpone_launch
UPDATE batches
SET launch_after = %(launch_after)s,
    launch_refused_at = CASE WHEN %(refused)s THEN coalesce(launch_refused_at, %(now)s) END
WHERE id = %(batch_id)s AND attempt = %(attempt)s AND launch_after IS NOT NULL

-- name: record_job_start
UPDATE batches SET job_running_since = %(now)s
WHERE id = %(batch_id)s AND attempt = %(attempt)s AND status IN ('in_progress', 'cancelling')
    AND job_running_since IS NULL
RETURNING id

-- name: record_job_end
-- The totals of a batch that has ended already lack what its job held since then.
WITH held AS (
    SELECT id, gpus * greatest(extract(epoch FROM %(now)s - job_running_since), 0) AS seconds FROM batches
    WHERE id = %(batch_id)s AND attempt = %(attempt)s
        AND (job_running_since IS NOT NULL OR job_ending_since IS NOT NULL)
    FOR UPDATE
), ended AS (
    UPDATE batches
    SET gpu_seconds = gpu_seconds + held.seconds, job_running_since = NULL, job_ending_since = NULL
    FROM held WHERE batches.id = held.id
    RETURNING project_id, model, status, held.seconds
)
UPDATE usage_totals AS totals SET gpu_seconds = totals.gpu_seconds + ended.seconds
FROM ended
WHERE totals.project_id = ended.project_id AND totals.model = ended.model
    AND ended.status IN ('failed', 'completed', 'expired', 'cancelled')

-- name: record_next_attempt
UPDATE batches
SET attempt = attempt + 1, launch_after = %(launch_after)s, failed_attempts = %(failed_attempts)s,
    committed_parts = %(committed_parts)s, rows_per_s = NULL, progress_at = NULL
WHERE id = %(batch_id)s AND attempt = %(attempt)s AND status = 'in_progress' AND giving_up_at IS NULL
RETURNING id

-- name: record_giving_up
-- Drops a due launch. If the job was launched but not recorded, it is stopped like any other job.
UPDATE batches
SET giving_up_at = %(now)s, giving_up_code = %(code)s, giving_up_message = %(message)s, launch_after = NULL
WHERE id = %(batch_id)s AND attempt = %(attempt)s AND status = 'in_progress' AND giving_up_at IS NULL
RETURNING id

-- name: record_misreport
UPDATE batches SET misreported_attempt = attempt
WHERE id = %(batch_id)s AND attempt = %(attempt)s AND status = 'in_progress'
RETURNING id

-- name: finalize_batch
UPDATE batches
SET status = 'finalizing', finalizing_at = %(now)s,
    job_ending_since = CASE WHEN %(is_job_ending)s THEN %(now)s END
WHERE id = %(batch_id)s AND status = 'in_progress'
RETURNING id

-- name: end_batch
-- If the job is still ending, the totals get its GPU seconds until now, and the rest once it has ended.
UPDATE batches
SET status = %(after)s,
    gpu_seconds = gpu_seconds + gpus * greatest(extract(epoch FROM %(now)s - job_running_since), 0),
    job_running_since = CASE WHEN job_running_since IS NOT NULL THEN %(now)s END,
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

-- name: measurements_of_model
SELECT rows, input_tokens, output_tokens, engines, engine_s, busy_s, other_s, job_other_s, output_share
FROM measurements WHERE model_key = %(model_key)s
ORDER BY id DESC LIMIT %(limit)s

-- name: record_measurement
-- Of a batch that has just ended. What several attempts took says little about the next batch. The time between its
-- acceptance and its launch is not counted: other batches were ahead, or no job could be launched.
WITH added AS (
    INSERT INTO measurements (model_key, measured_at, rows, input_tokens, output_tokens, engines, engine_s, busy_s,
                              other_s, job_other_s, output_share)
    SELECT %(model_key)s, %(now)s, %(rows)s, %(input_tokens)s, %(output_tokens)s, %(engines)s, %(engine_s)s,
           %(busy_s)s,
           greatest(0, extract(epoch FROM (in_progress_at - created_at) + (%(now)s - launched_at)) - %(busy_s)s),
           greatest(0, coalesce(gpu_seconds / nullif(gpus, 0), 0) - %(busy_s)s),
           batches.output_tokens / nullif(%(most_output)s::double precision, 0)
    FROM batches, LATERAL (
        SELECT at AS launched_at FROM batch_events
        WHERE batch_id = batches.id AND type = 'job.launched'
        ORDER BY batch_events.id LIMIT 1
    ) AS launch
    WHERE id = %(batch_id)s AND attempt = 1
)
DELETE FROM measurements
WHERE model_key = %(model_key)s AND id < (
    SELECT min(id) FROM (
        SELECT id FROM measurements WHERE model_key = %(model_key)s ORDER BY id DESC LIMIT %(limit)s
    ) AS newest
)

-- name: insert_batch_file
INSERT INTO files (id, project_id, purpose, filename, size_bytes, sha256, created_at, expires_at)
SELECT %(id)s, id, 'batch_output', %(filename)s, %(size_bytes)s, %(sha256)s, %(now)s,
       %(now)s + make_interval(secs => coalesce(%(expires_after_s)s, retention_s, %(retention_s)s))
FROM projects WHERE id = %(project_id)s

-- name: record_parts_deleted
UPDATE batches SET parts_deleted_at = %(now)s
WHERE id = %(batch_id)s AND status IN ('failed', 'completed', 'expired', 'cancelled')

-- name: record_waiting
-- The reason can change whenever a node joins or leaves, so an event is at most added every ten minutes.
INSERT INTO batch_events (batch_id, at, type, data)
SELECT %(batch_id)s, %(now)s, %(type)s, jsonb_build_object('job_id', %(job_id)s::text, 'reason', %(reason)s::text)
WHERE NOT EXISTS (
    SELECT FROM (
        SELECT at, data ->> 'reason' AS reason FROM batch_events
        WHERE batch_id = %(batch_id)s AND type = %(type)s AND data ->> 'job_id' = %(job_id)s
        ORDER BY id DESC LIMIT 1
    ) AS latest
    WHERE reason = %(reason)s OR at > %(now)s - interval '10 min'
)

-- name: insert_batch_event
INSERT INTO batch_events (batch_id, at, type, data) VALUES (%(batch_id)s, %(now)s, %(type)s, %(data)s)
