-- What the reconciler exports to Prometheus, for operators: by project, model and accelerator.

-- name: usage_by_project
-- Totals of ended batches plus the current numbers of open ones, so that a counter does not fall when a batch ends.
-- A batch has a model only once it was found in the catalogue.
SELECT project_id, model, sum(completed)::bigint AS completed, sum(failed)::bigint AS failed,
       sum(input_tokens)::bigint AS input_tokens, sum(cached_tokens)::bigint AS cached_tokens,
       sum(output_tokens)::bigint AS output_tokens, sum(reasoning_tokens)::bigint AS reasoning_tokens,
       sum(gpu_seconds)::double precision AS gpu_seconds
FROM (
    SELECT project_id, model, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens,
           gpu_seconds
    FROM usage_totals
    UNION ALL
    SELECT project_id, model, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens,
           gpu_seconds
    FROM batches
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling') AND model IS NOT NULL
) AS used
GROUP BY project_id, model

-- name: work_by_model
-- Batches that may be worked on.
SELECT model, count(*) FILTER (WHERE first_leased_at IS NULL) AS waiting_batches,
       count(*) FILTER (WHERE at_risk_at < now() AT TIME ZONE 'UTC') AS batches_at_risk,
       sum(segments_left)::bigint AS segments,
       extract(epoch FROM now() - min(in_progress_at) FILTER (WHERE first_leased_at IS NULL))::double precision
           AS queue_age_s,
       sum(rows_per_s) FILTER (WHERE progress_at > now() - interval '1 min') AS rows_per_s
FROM batches
WHERE status = 'in_progress' AND segments_left > 0 AND paused_at IS NULL
GROUP BY model

-- name: engines_by_model
SELECT model, sum(engines)::bigint AS engines FROM jobs WHERE gone_at IS NULL GROUP BY model

-- name: failures_by_model
-- Of jobs in a row without a commit between them; of a model's sharing domains the one with the most.
SELECT model, max(failures) AS failures FROM domains GROUP BY model

-- name: slots_by_accelerator
SELECT accelerator, count(*) FILTER (WHERE launch_after IS NULL) AS slots_used,
       extract(epoch FROM now() - min(created_at) FILTER (WHERE launch_after IS NOT NULL AND draining_at IS NULL))
           ::double precision AS queue_age_s
FROM jobs WHERE gone_at IS NULL GROUP BY accelerator

-- name: audit_lag
-- The age of the oldest entry of the audit log after the last sealed one.
SELECT extract(epoch FROM now() - min(at))::double precision AS age_s FROM audit_log
WHERE seq > coalesce((SELECT seq FROM audit_seals ORDER BY position DESC LIMIT 1), '-9223372036854775808'::bigint)
