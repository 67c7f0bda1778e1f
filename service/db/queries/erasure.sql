-- Erasure of projects; see service.reconciler.erasure. The audit log and the receipts stay.

-- name: start_erasure
-- The name may be used again, and may be personal data.
UPDATE projects SET erasing_at = now(), archived_at = coalesce(archived_at, now()), name = id
WHERE id = %(id)s AND erasing_at IS NULL
RETURNING id

-- name: erasure_progress
SELECT (SELECT count(*) FROM batches
        WHERE project_id = projects.id AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling'))
           AS open_batches,
       (SELECT count(*) FROM batches WHERE project_id = projects.id) AS batches,
       (SELECT count(*) FROM files WHERE project_id = projects.id) AS files,
       (SELECT count(*) FROM jobs WHERE project_id = projects.id AND domain <> 'stack' AND gone_at IS NULL) AS jobs,
       (SELECT max(leftovers_due_at) FROM batches WHERE project_id = projects.id) AS urls_expire_at
FROM projects WHERE id = %(id)s AND erasing_at IS NOT NULL

-- name: cancel_erased_batches
-- A batch that a commit or a step holds at this moment is cancelled by the next sweep.
WITH open AS (
    SELECT batches.id FROM batches JOIN projects ON projects.id = project_id
    WHERE erasing_at IS NOT NULL AND status IN ('validating', 'in_progress', 'finalizing')
    FOR UPDATE OF batches SKIP LOCKED
), cancelled AS (
    UPDATE batches SET status = 'cancelling', cancelling_at = now() FROM open WHERE batches.id = open.id
    RETURNING batches.id
)
INSERT INTO batch_events (batch_id, type) SELECT id, 'batch.cancelling' FROM cancelled

-- name: drain_erased_jobs
UPDATE jobs SET draining_at = now()
FROM projects
WHERE projects.id = project_id AND erasing_at IS NOT NULL
  AND domain <> 'stack' AND draining_at IS NULL AND ended_at IS NULL AND gone_at IS NULL

-- name: expire_erased_files
UPDATE files SET expires_at = now()
FROM projects
WHERE projects.id = project_id AND erasing_at IS NOT NULL AND (expires_at IS NULL OR expires_at > now())

-- name: lock_erased_project
SELECT id FROM projects
WHERE erasing_at IS NOT NULL
  AND NOT EXISTS (SELECT FROM files WHERE project_id = projects.id)
  AND NOT EXISTS (SELECT FROM batches WHERE project_id = projects.id)
  AND NOT EXISTS (SELECT FROM jobs WHERE project_id = projects.id AND domain <> 'stack' AND gone_at IS NULL)
LIMIT 1
FOR UPDATE SKIP LOCKED

-- name: domains_of_project
SELECT model, domain FROM turns WHERE project_id = %(id)s AND domain <> 'stack'

-- name: keep_totals_of_project
-- Metrics are sums over all projects, and must not fall.
INSERT INTO usage_totals AS totals (project_id, model, batches, completed, failed, input_tokens, cached_tokens,
                                    output_tokens, reasoning_tokens, gpu_seconds, jobs_launched)
SELECT '', model, batches, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens,
       gpu_seconds, jobs_launched
FROM usage_totals WHERE project_id = %(id)s
ON CONFLICT (project_id, model) DO UPDATE SET
    batches = totals.batches + EXCLUDED.batches,
    completed = totals.completed + EXCLUDED.completed,
    failed = totals.failed + EXCLUDED.failed,
    input_tokens = totals.input_tokens + EXCLUDED.input_tokens,
    cached_tokens = totals.cached_tokens + EXCLUDED.cached_tokens,
    output_tokens = totals.output_tokens + EXCLUDED.output_tokens,
    reasoning_tokens = totals.reasoning_tokens + EXCLUDED.reasoning_tokens,
    gpu_seconds = totals.gpu_seconds + EXCLUDED.gpu_seconds,
    jobs_launched = totals.jobs_launched + EXCLUDED.jobs_launched

-- name: remove_totals_of_project
DELETE FROM usage_totals WHERE project_id = %(id)s

-- name: keep_usage_of_project
-- As usage of the stack itself: what its jobs held does not shrink.
WITH removed AS (
    DELETE FROM daily_usage WHERE project_id = %(id)s
    RETURNING *
)
INSERT INTO daily_usage AS usage
    (day, project_id, model, currency, batches, completed, failed, input_tokens, cached_tokens, output_tokens,
     reasoning_tokens, gpu_seconds, overhead_gpu_seconds, cost, overhead_cost)
SELECT day, '', model, currency, batches, completed, failed, input_tokens, cached_tokens, output_tokens,
       reasoning_tokens, gpu_seconds, overhead_gpu_seconds, cost, overhead_cost
FROM removed
ORDER BY day, model, currency
ON CONFLICT (day, project_id, model, currency) DO UPDATE SET
    batches = usage.batches + EXCLUDED.batches,
    completed = usage.completed + EXCLUDED.completed,
    failed = usage.failed + EXCLUDED.failed,
    input_tokens = usage.input_tokens + EXCLUDED.input_tokens,
    cached_tokens = usage.cached_tokens + EXCLUDED.cached_tokens,
    output_tokens = usage.output_tokens + EXCLUDED.output_tokens,
    reasoning_tokens = usage.reasoning_tokens + EXCLUDED.reasoning_tokens,
    gpu_seconds = usage.gpu_seconds + EXCLUDED.gpu_seconds,
    overhead_gpu_seconds = usage.overhead_gpu_seconds + EXCLUDED.overhead_gpu_seconds,
    cost = usage.cost + EXCLUDED.cost,
    overhead_cost = usage.overhead_cost + EXCLUDED.overhead_cost

-- name: remove_endpoints_of_project
DELETE FROM webhook_endpoints WHERE project_id = %(id)s

-- name: remove_refusals_of_project
DELETE FROM refused_creations WHERE project_id = %(id)s

-- name: remove_keys_of_project
DELETE FROM api_keys WHERE project_id = %(id)s

-- name: release_shared_jobs_of_project
UPDATE jobs SET project_id = NULL WHERE project_id = %(id)s AND domain = 'stack'

-- name: remove_jobs_of_project
DELETE FROM jobs WHERE project_id = %(id)s

-- name: remove_turns_of_project
DELETE FROM turns WHERE project_id = %(id)s

-- name: remove_domain
DELETE FROM domains WHERE model = %(model)s AND domain = %(domain)s

-- name: remove_project
DELETE FROM projects WHERE id = %(id)s
