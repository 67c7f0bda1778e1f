-- Read-only queries: running batches as clients see them, and the stack as probes and metrics see it.

-- name: batch_with_extension
-- launch_queue reads all open batches, so it is used only for a batch that can be in it.
SELECT batches.*,
       (SELECT jsonb_agg(to_jsonb(e) ORDER BY e.ordinal) FROM batch_errors e WHERE e.batch_id = batches.id) AS errors,
       CASE WHEN status = 'in_progress' AND launch_after <= now()
            THEN (SELECT position FROM launch_queue WHERE launch_queue.id = batches.id) END AS queue_position,
       (SELECT data ->> 'reason' FROM batch_events
        WHERE batch_id = batches.id AND type = 'job.ended'
        ORDER BY batch_events.id DESC LIMIT 1) AS last_job_message,
       now() AS now
FROM batches
WHERE id = %(id)s AND project_id = %(project_id)s

-- name: watched_batch
SELECT id FROM batches WHERE id = %(id)s AND project_id = %(project_id)s

-- name: watched_batches
-- One statement, so that a state and its event become visible together. Each batch has its own last event.
SELECT batches.id, status, total, completed, failed, input_tokens, output_tokens, rows_per_s, progress_at, created_at,
       expires_at, now() AS now,
       (SELECT jsonb_agg(jsonb_build_object('id', e.id, 'type', e.type, 'data', e.data,
                                            'at', extract(epoch FROM e.at)) ORDER BY e.id)
        FROM batch_events e WHERE e.batch_id = batches.id AND e.id > seen.last_id) AS events
FROM unnest(%(ids)s::text[], %(last_ids)s::bigint[]) AS seen (id, last_id)
JOIN batches ON batches.id = seen.id

-- name: migrations_that_ran
SELECT name FROM migrations

-- name: heartbeat_age
SELECT extract(epoch FROM now() - beat_at)::double precision AS age_s FROM reconciler_heartbeat

-- name: stack_totals
-- Totals of ended batches plus the current numbers of open ones, so that a counter does not fall when a batch ends.
WITH open AS (
    SELECT * FROM batches WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
), ended AS (
    SELECT coalesce(sum(batches), 0) AS batches, coalesce(sum(completed), 0) AS completed,
           coalesce(sum(failed), 0) AS failed, coalesce(sum(input_tokens), 0) AS input_tokens,
           coalesce(sum(cached_tokens), 0) AS cached_tokens, coalesce(sum(output_tokens), 0) AS output_tokens,
           coalesce(sum(reasoning_tokens), 0) AS reasoning_tokens, coalesce(sum(gpu_seconds), 0) AS gpu_seconds,
           coalesce(sum(jobs_launched), 0) AS jobs_launched
    FROM usage_totals
), running AS (
    SELECT coalesce(sum(completed), 0) AS completed, coalesce(sum(failed), 0) AS failed,
           coalesce(sum(input_tokens), 0) AS input_tokens, coalesce(sum(cached_tokens), 0) AS cached_tokens,
           coalesce(sum(output_tokens), 0) AS output_tokens, coalesce(sum(reasoning_tokens), 0) AS reasoning_tokens,
           coalesce(sum(gpu_seconds + gpus * greatest(extract(epoch FROM now() - job_running_since), 0)), 0)
               AS gpu_seconds
    FROM open
)
SELECT (SELECT jsonb_object_agg(status, batches) FROM (
            SELECT status, count(*) AS batches FROM batches GROUP BY status) AS by_status) AS batches,
       (ended.completed + running.completed)::bigint AS completed,
       (ended.failed + running.failed)::bigint AS failed,
       (ended.input_tokens + running.input_tokens)::bigint AS input_tokens,
       (ended.cached_tokens + running.cached_tokens)::bigint AS cached_tokens,
       (ended.output_tokens + running.output_tokens)::bigint AS output_tokens,
       (ended.reasoning_tokens + running.reasoning_tokens)::bigint AS reasoning_tokens,
       (ended.gpu_seconds + running.gpu_seconds)::double precision AS gpu_seconds,
       ended.jobs_launched::bigint AS jobs_launched,
       (SELECT extract(epoch FROM now() - min(launch_after))::double precision FROM open
        WHERE status = 'in_progress' AND launch_after <= now() AND paused_at IS NULL) AS queue_age_s,
       (SELECT extract(epoch FROM now() - beat_at)::double precision FROM reconciler_heartbeat) AS heartbeat_age_s
FROM ended, running
