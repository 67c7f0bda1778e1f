-- Reads and writes of the reconciler. Each change of a batch names the state that it starts from, so that it never
-- overwrites a cancel or the change of another reconciler.

-- name: batches_to_advance
-- Batches that a step can advance now. Each leaves its state, or is done, with its step. The projects take turns, so
-- that one with thousands of new batches does not delay another's first.
WITH due AS (
    SELECT id, project_id, seq FROM batches
    WHERE parts_deleted_at IS NULL
      AND (status <> 'in_progress' OR coalesce(segments_left, 0) = 0 OR giving_up_at IS NOT NULL)
    UNION
    SELECT id, project_id, seq FROM batches WHERE status = 'in_progress' AND expires_at <= now()
)
SELECT id FROM due
WHERE id <> ALL (%(excluded)s)
ORDER BY row_number() OVER (PARTITION BY project_id ORDER BY seq), seq
LIMIT %(limit)s

-- name: is_anything_open
-- Whether a pass soon may find something to do that no notification tells of: jobs to look at, or work without a job.
SELECT EXISTS (SELECT FROM jobs WHERE gone_at IS NULL AND (idle_since IS NULL OR ended_at IS NOT NULL))
    OR EXISTS (SELECT FROM batches WHERE status = 'in_progress' AND segments_left > 0 AND paused_at IS NULL)
    OR EXISTS (SELECT FROM batches
               WHERE parts_deleted_at IS NULL
                 AND (status <> 'in_progress' OR coalesce(segments_left, 0) = 0 OR giving_up_at IS NOT NULL))
    AS is_open

-- name: batch_to_reconcile
SELECT id, project_id, endpoint, input_file_id, output_expires_after_s, status, model, domain, expires_at,
       finalizing_at, total, attempt, created_at, segments_left, giving_up_at, giving_up_code, giving_up_message,
       (estimate ->> 'most_output')::bigint AS most_output,
       CASE WHEN (estimate ->> 'sampled_lines')::bigint = total
            THEN (estimate ->> 'input_tokens')::bigint END AS counted_tokens,
       now() AS read_at
FROM batches WHERE id = %(batch_id)s

-- name: beat
INSERT INTO reconciler_heartbeat (leader, beat_at) VALUES (%(leader)s, now())
ON CONFLICT (only_row) DO UPDATE SET leader = EXCLUDED.leader, beat_at = EXCLUDED.beat_at

-- name: input_file_of_batch
SELECT id, purpose, size_bytes, line_count, deleted_at, expires_at FROM files WHERE id = %(file_id)s AND project_id = %(project_id)s

-- name: find_images
SELECT id, size_bytes FROM files
WHERE id = ANY (%(ids)s) AND project_id = %(project_id)s AND purpose = 'vision'
  AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > now())

-- name: accept_batch
UPDATE batches
SET status = 'in_progress', model = %(model)s, total = %(total)s, enqueued_requests = %(total)s,
    in_progress_at = %(now)s, estimate = %(estimate)s, domain = %(domain)s, segments_left = %(segments)s
WHERE id = %(batch_id)s AND status = 'validating'
RETURNING id

-- name: record_plan_again
-- Of a batch that an earlier version accepted.
UPDATE batches
SET domain = %(domain)s, segments_left = %(segments)s, completed = %(completed)s, failed = %(failed)s,
    input_tokens = %(input_tokens)s, cached_tokens = %(cached_tokens)s,
    output_tokens = %(output_tokens)s, reasoning_tokens = %(reasoning_tokens)s
WHERE id = %(batch_id)s AND status = 'in_progress' AND domain IS NULL
RETURNING id

-- name: insert_segments
-- The ids of files are joined by commas, because an array of arrays of different lengths does not exist.
INSERT INTO segments (batch_id, number, start_byte, end_byte, rows, tokens, media_bytes, files)
SELECT %(batch_id)s, number, start_byte, end_byte, rows, tokens, media_bytes, string_to_array(files, ',')
FROM unnest(%(numbers)s::integer[], %(start_bytes)s::bigint[], %(end_bytes)s::bigint[], %(rows)s::integer[],
            %(tokens)s::bigint[], %(media_bytes)s::bigint[], %(files)s::text[])
    AS segment (number, start_byte, end_byte, rows, tokens, media_bytes, files)

-- name: insert_earlier_part
-- A part that a job of an earlier version wrote.
INSERT INTO parts (key, batch_id, accepted, refused_lines)
VALUES (%(key)s, %(batch_id)s, '{true}', %(refused_lines)s)

-- name: insert_domain
INSERT INTO domains (model, domain) VALUES (%(model)s, %(domain)s) ON CONFLICT DO NOTHING

-- name: insert_turn
INSERT INTO turns (model, domain, project_id) VALUES (%(model)s, %(domain)s, %(project_id)s) ON CONFLICT DO NOTHING

-- name: announce_work
SELECT pg_notify('work', %(model)s || E'\n' || %(domain)s)

-- name: parts_of_batch
SELECT key, refused_lines FROM parts WHERE batch_id = %(batch_id)s ORDER BY key

-- name: jobs_with_commits
SELECT id FROM jobs
WHERE id IN (SELECT job_id FROM parts WHERE batch_id = %(batch_id)s) AND model_key = %(model_key)s

-- name: refuse_batch
UPDATE batches SET status = 'failed', failed_at = %(now)s, error_count = %(error_count)s
WHERE id = %(batch_id)s AND status = 'validating'
RETURNING id

-- name: insert_batch_error
INSERT INTO batch_errors (batch_id, ordinal, code, message, param, line)
VALUES (%(batch_id)s, %(ordinal)s, %(code)s, %(message)s, %(param)s, %(line)s)

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

-- name: measurements_of_model
SELECT rows, input_tokens, output_tokens, engines, engine_s, busy_s, other_s, job_other_s, output_share
FROM measurements WHERE model_key = %(model_key)s
ORDER BY id DESC LIMIT %(limit)s

-- name: record_measurement
-- Of a batch that has just ended, if one job did all of its work and, between its first lease and its last commit,
-- that of no other batch. If the job was there before the batch, the batch waited for others until its first lease,
-- else for a place to launch the job: neither time is counted.
WITH measured AS (
    SELECT batches.*, jobs.engines, jobs.gpus AS job_gpus, jobs.running_since,
           extract(epoch FROM last_commit_at - first_leased_at)::double precision AS busy_s,
           CASE WHEN jobs.launched_at > in_progress_at THEN jobs.launched_at ELSE first_leased_at END AS began_at,
           -- Batches of a model have about the same share of equal lines, unless most are equal.
           CASE WHEN planned.rows * 2 > total THEN 1 ELSE planned.rows / total::double precision END AS share
    FROM batches
    JOIN (
        SELECT batch_id, min(job_id) AS job_id FROM parts WHERE batch_id = %(batch_id)s
        GROUP BY batch_id HAVING count(DISTINCT job_id) = 1 AND count(*) = count(job_id)
    ) AS worker ON worker.batch_id = batches.id
    JOIN jobs ON jobs.id = worker.job_id
    JOIN (
        SELECT batch_id, sum(rows) AS rows FROM segments WHERE batch_id = %(batch_id)s GROUP BY batch_id
    ) AS planned ON planned.batch_id = batches.id
    WHERE NOT EXISTS (
        SELECT FROM job_batches JOIN batches AS other ON other.id = job_batches.batch_id
        WHERE job_batches.job_id = jobs.id AND other.id <> batches.id
            AND other.first_leased_at <= batches.last_commit_at AND other.last_commit_at >= batches.first_leased_at
    )
), added AS (
    INSERT INTO measurements (model_key, measured_at, rows, input_tokens, output_tokens, engines, engine_s, busy_s,
                              other_s, job_other_s, output_share)
    SELECT %(model_key)s, %(now)s, total * share, input_tokens * share, output_tokens * share, engines,
           engines * busy_s, busy_s,
           greatest(0, extract(epoch FROM (in_progress_at - created_at) + (%(now)s - began_at)) - busy_s),
           CASE WHEN job_gpus > 0
                THEN greatest(0, coalesce(extract(epoch FROM first_leased_at - greatest(running_since, began_at)), 0))
                ELSE 0 END,
           output_tokens / nullif(%(most_output)s::double precision, 0)
    FROM measured
    WHERE busy_s > 0 AND engines > 0
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
       %(now)s + make_interval(secs => least(%(expires_after_s)s, coalesce(retention_s, %(retention_s)s)))
FROM projects WHERE id = %(project_id)s

-- name: record_parts_deleted
-- A job that has lost its leases may still write parts, and a reconciler that does not lead any more a plan. So
-- leftovers are deleted once the URLs have expired.
WITH ended AS (
    UPDATE batches
    SET parts_deleted_at = %(now)s, leftovers_due_at = now() + interval '1 h'
    WHERE id = %(batch_id)s AND status IN ('failed', 'completed', 'expired', 'cancelled')
    RETURNING id
), removed AS (
    DELETE FROM segments USING ended WHERE batch_id = ended.id
)
DELETE FROM parts USING ended WHERE batch_id = ended.id

-- name: record_waiting
-- The reason can change whenever a node joins or leaves, so an event is at most added every ten minutes.
INSERT INTO batch_events (batch_id, at, type, data)
SELECT %(batch_id)s, %(now)s, %(type)s, jsonb_build_object('reason', %(reason)s::text)
WHERE NOT EXISTS (
    SELECT FROM (
        SELECT at, data ->> 'reason' AS reason FROM batch_events
        WHERE batch_id = %(batch_id)s AND type = %(type)s
        ORDER BY id DESC LIMIT 1
    ) AS latest
    WHERE reason = %(reason)s OR at > %(now)s - interval '10 min'
)

-- name: insert_batch_event
INSERT INTO batch_events (batch_id, at, type, data) VALUES (%(batch_id)s, %(now)s, %(type)s, %(data)s)
