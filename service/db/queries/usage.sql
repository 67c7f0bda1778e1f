-- Usage and costs by day, and the queue and the jobs of each model.

-- name: usage
-- Days from the first to the one before the end; grouped by what is asked for, else added up.
SELECT CASE WHEN %(by_day)s THEN day END AS day,
       CASE WHEN %(by_project)s THEN project_id END AS project_id,
       CASE WHEN %(by_model)s THEN model END AS model,
       CASE WHEN %(by_currency)s THEN currency END AS currency,
       sum(batches)::bigint AS batches, sum(completed)::bigint AS completed, sum(failed)::bigint AS failed,
       sum(input_tokens)::bigint AS input_tokens, sum(cached_tokens)::bigint AS cached_tokens,
       sum(output_tokens)::bigint AS output_tokens, sum(gpu_seconds) AS gpu_seconds,
       sum(overhead_gpu_seconds) AS overhead_gpu_seconds, sum(cost) AS cost, sum(overhead_cost) AS overhead_cost
FROM daily_usage
WHERE day >= %(first)s AND day < %(end)s
  AND (%(project_ids)s::text[] IS NULL OR project_id = ANY (%(project_ids)s))
  AND (%(models)s::text[] IS NULL OR model = ANY (%(models)s))
GROUP BY 1, 2, 3, 4
ORDER BY 1, 2, 3, 4

-- name: usage_by_batch
-- The batches that ended in these days, then what else the days hold, so that the sums are those of the days.
WITH ended AS (
    SELECT id, project_id, model, coalesce(currency, '') AS currency, completed, failed, input_tokens, cached_tokens,
           output_tokens, gpu_seconds, coalesce(cost, 0) AS cost
    FROM batches
    WHERE status IN ('completed', 'failed', 'expired', 'cancelled') AND model IS NOT NULL
      AND coalesce(completed_at, failed_at, expired_at, cancelled_at) >= %(first)s::timestamp AT TIME ZONE 'UTC'
      AND coalesce(completed_at, failed_at, expired_at, cancelled_at) < %(end)s::timestamp AT TIME ZONE 'UTC'
), days AS (
    SELECT project_id, model, currency, sum(batches)::bigint AS batches, sum(completed)::bigint AS completed,
           sum(failed)::bigint AS failed, sum(input_tokens)::bigint AS input_tokens,
           sum(cached_tokens)::bigint AS cached_tokens, sum(output_tokens)::bigint AS output_tokens,
           sum(gpu_seconds) AS gpu_seconds, sum(overhead_gpu_seconds) AS overhead_gpu_seconds, sum(cost) AS cost,
           sum(overhead_cost) AS overhead_cost
    FROM daily_usage WHERE day >= %(first)s AND day < %(end)s
    GROUP BY project_id, model, currency
), listed AS (
    SELECT project_id, model, currency, count(*) AS batches, sum(completed)::bigint AS completed,
           sum(failed)::bigint AS failed, sum(input_tokens)::bigint AS input_tokens,
           sum(cached_tokens)::bigint AS cached_tokens, sum(output_tokens)::bigint AS output_tokens,
           sum(gpu_seconds) AS gpu_seconds, sum(cost) AS cost
    FROM ended
    GROUP BY project_id, model, currency
)
SELECT * FROM (
    SELECT id, project_id, model, currency, 1 AS batches, completed, failed, input_tokens, cached_tokens,
           output_tokens, gpu_seconds, 0 AS overhead_gpu_seconds, cost, 0 AS overhead_cost
    FROM ended
    UNION ALL
    SELECT '(deleted batches)', project_id, model, currency, days.batches - coalesce(listed.batches, 0),
           days.completed - coalesce(listed.completed, 0), days.failed - coalesce(listed.failed, 0),
           days.input_tokens - coalesce(listed.input_tokens, 0),
           days.cached_tokens - coalesce(listed.cached_tokens, 0),
           days.output_tokens - coalesce(listed.output_tokens, 0),
           greatest(days.gpu_seconds - coalesce(listed.gpu_seconds, 0), 0), 0, days.cost - coalesce(listed.cost, 0), 0
    FROM days LEFT JOIN listed USING (project_id, model, currency)
    WHERE days.batches > coalesce(listed.batches, 0)
    UNION ALL
    SELECT '(overhead)', project_id, model, currency, 0, 0, 0, 0, 0, 0, 0, overhead_gpu_seconds, 0, overhead_cost
    FROM days
    WHERE overhead_gpu_seconds > 0
) AS lines
ORDER BY project_id, model, id COLLATE "C"

-- name: queues_of_models
-- Batches that wait or run, with the rows that are not committed and their share of the estimated tokens. The number
-- of batches without an estimate of both kinds of tokens is unknown_batches.
SELECT model, count(*) AS batches, sum(rows)::bigint AS rows,
       coalesce(sum(rows * input_tokens / greatest(total, 1)), 0)::double precision AS input_tokens,
       coalesce(sum(rows * output_tokens / greatest(total, 1)), 0)::double precision AS output_tokens,
       count(*) FILTER (WHERE input_tokens IS NULL OR output_tokens IS NULL) AS unknown_batches
FROM (
    SELECT model, total, total - completed - failed AS rows,
           coalesce((estimate ->> 'input_tokens')::numeric, enqueued_tokens) AS input_tokens,
           (estimate ->> 'output_tokens')::numeric AS output_tokens
    FROM batches
    WHERE status = 'in_progress' AND segments_left > 0 AND paused_at IS NULL AND model IS NOT NULL
) AS waiting
GROUP BY model

-- name: jobs_by_model
-- Jobs that are queued or hold a slot; ready engines of those that take work.
SELECT model, accelerator, count(*) FILTER (WHERE launch_after IS NULL) AS running,
       count(*) FILTER (WHERE launch_after IS NOT NULL) AS queued,
       coalesce(sum(gpus) FILTER (WHERE launch_after IS NULL), 0)::bigint AS gpus,
       coalesce(sum(engines) FILTER (WHERE draining_at IS NULL AND ended_at IS NULL), 0)::bigint AS engines
FROM jobs
WHERE gone_at IS NULL
GROUP BY model, accelerator

-- name: project_names
SELECT id, name FROM projects
