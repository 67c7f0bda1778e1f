-- Read-only queries: running batches as clients see them, and the stack as probes and metrics see it.

-- name: batch_with_extension
-- Its job is the one that takes the work of its domain; none while it is paused.
SELECT batches.*,
       (SELECT jsonb_agg(to_jsonb(e) ORDER BY e.ordinal) FROM batch_errors e WHERE e.batch_id = batches.id) AS errors,
       taking.id AS job_id,
       taking.launch_after IS NOT NULL AS is_queued,
       coalesce((SELECT failures FROM domains WHERE domains.model = batches.model AND domains.domain = batches.domain), 0)
           AS failed_jobs,
       (SELECT data ->> 'reason' FROM batch_events
        WHERE batch_id = batches.id AND type = 'job.ended'
        ORDER BY batch_events.id DESC LIMIT 1) AS last_job_message,
       now() AS now
-- LIMIT makes Postgres look the job up in the index, also while it has no statistics of thousands of new jobs.
FROM batches LEFT JOIN LATERAL (
    SELECT jobs.id, launch_after FROM jobs
    WHERE jobs.model = batches.model AND jobs.domain = batches.domain AND draining_at IS NULL AND ended_at IS NULL
        AND batches.status = 'in_progress' AND paused_at IS NULL
    LIMIT 1
) AS taking ON true
WHERE batches.id = %(id)s AND project_id = %(project_id)s

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

-- name: jobs_of_project
-- Jobs that can run batches of a project, without those that are gone. Projects that share a job must not learn about
-- each other's work: its segments, batches and rates are those of the project.
SELECT jobs.id, jobs.model, accelerator, gpus, engines, jobs.created_at, launched_at, idle_since, seen_at, now() AS now,
       CASE WHEN ended_at IS NOT NULL THEN 'ending'
            WHEN launch_after IS NOT NULL THEN 'queued'
            WHEN draining_at IS NOT NULL THEN 'draining'
            WHEN engines = 0 THEN 'starting'
            WHEN idle_since IS NOT NULL THEN 'warm'
            ELSE 'working' END AS status,
       leased.segments, leased.batches, leased.lease_age_s, work.rows_per_s, work.segments_left
FROM jobs CROSS JOIN LATERAL (
    SELECT count(*) AS segments, count(DISTINCT batch_id) AS batches,
           extract(epoch FROM now() - min(leased_at))::double precision AS lease_age_s
    FROM segments CROSS JOIN LATERAL (
        SELECT FROM batches WHERE batches.id = batch_id AND project_id = %(project_id)s LIMIT 1
    ) AS batch
    WHERE segments.job_id = jobs.id AND NOT is_done
) AS leased
CROSS JOIN LATERAL (
    SELECT coalesce(sum(rows_per_s) FILTER (WHERE progress_at > now() - interval '1 min'), 0) AS rows_per_s,
           coalesce(sum(segments_left), 0)::bigint AS segments_left
    FROM batches
    WHERE batches.model = jobs.model AND batches.domain = jobs.domain AND status = 'in_progress'
      AND segments_left > 0 AND paused_at IS NULL AND batches.project_id = %(project_id)s
) AS work
WHERE gone_at IS NULL
  AND (domain = 'stack' OR domain = %(project_id)s
       OR domain IN (SELECT id FROM batches WHERE project_id = %(project_id)s AND status = 'in_progress'))
ORDER BY jobs.seq

-- name: job_queues
-- The jobs of each queue in its order.
SELECT array_agg(id ORDER BY position) AS ids FROM job_queue GROUP BY accelerator

-- name: job_totals
-- Jobs by state, and what is measured about them.
SELECT (SELECT jsonb_object_agg(state, jobs) FROM (
            SELECT CASE WHEN launch_after IS NOT NULL THEN 'queued'
                        WHEN draining_at IS NOT NULL THEN 'draining'
                        WHEN idle_since IS NOT NULL THEN 'warm'
                        ELSE 'working' END AS state, count(*) AS jobs
            FROM jobs WHERE gone_at IS NULL GROUP BY state) AS by_state) AS jobs,
       (SELECT coalesce(sum(engines), 0) FROM jobs WHERE gone_at IS NULL AND idle_since IS NOT NULL) AS warm_engines,
       (SELECT coalesce(extract(epoch FROM now() - min(leased_at)), 0)::double precision FROM segments
        WHERE job_id IS NOT NULL AND NOT is_done) AS lease_age_s,
       (SELECT coalesce(sum(failures), 0) FROM segments WHERE NOT is_done) AS segment_failures,
       (SELECT coalesce(max(spread), 0) FROM (
            SELECT max(finish) - min(finish) AS spread FROM turns
            WHERE EXISTS (SELECT FROM batches
                          WHERE batches.model = turns.model AND batches.domain = turns.domain
                            AND batches.project_id = turns.project_id AND status = 'in_progress'
                            AND segments_left > 0 AND paused_at IS NULL)
            GROUP BY model, domain) AS spreads) AS turn_spread

-- name: migrations_that_ran
SELECT name FROM migrations

-- name: can_change_audit_log
-- The owner and superusers are members of the owner's role.
SELECT pg_has_role(relowner, 'MEMBER')
       OR has_table_privilege(oid, 'UPDATE') OR has_table_privilege(oid, 'DELETE')
       OR has_table_privilege(oid, 'TRUNCATE')
FROM pg_class WHERE oid = to_regclass('audit_log')

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
           coalesce(sum(gpu_seconds), 0) AS gpu_seconds
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
       (SELECT extract(epoch FROM now() - min(in_progress_at))::double precision FROM open
        WHERE status = 'in_progress' AND segments_left > 0 AND first_leased_at IS NULL AND paused_at IS NULL)
           AS queue_age_s,
       (SELECT extract(epoch FROM now() - beat_at)::double precision FROM reconciler_heartbeat) AS heartbeat_age_s
FROM ended, running
