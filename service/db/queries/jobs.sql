-- Jobs as the reconciler creates, launches, watches and ends them. What jobs do is in coordinator.sql.

-- name: domains_without_job
-- Sharing domains with work that no job takes; the projects take turns. Paused batches are no work. EXCEPT compares by
-- hashes: Postgres has no statistics yet for thousands of batches that have just come, and would choose slow joins.
WITH idle AS (
    SELECT model, domain FROM batches
    WHERE status = 'in_progress' AND segments_left > 0 AND paused_at IS NULL AND giving_up_at IS NULL
    EXCEPT
    SELECT model, domain FROM jobs WHERE draining_at IS NULL AND ended_at IS NULL
    EXCEPT
    SELECT model, domain FROM domains WHERE not_before > now()
)
SELECT model, domain, CASE WHEN domain <> 'stack' THEN project_id END AS project_id
FROM idle CROSS JOIN LATERAL (
    SELECT project_id, seq FROM batches
    WHERE batches.model = idle.model AND batches.domain = idle.domain
      AND status = 'in_progress' AND segments_left > 0 AND paused_at IS NULL
    LIMIT 1
) AS any_batch
ORDER BY row_number() OVER (PARTITION BY project_id ORDER BY seq), seq
LIMIT %(limit)s

-- name: create_job
INSERT INTO jobs (id, model, domain, model_key, project_id, token_sha256, accelerator, gpus, model_digest,
                  per_gpu_hour, currency, launch_after)
VALUES (%(id)s, %(model)s, %(domain)s, %(model_key)s, %(project_id)s, %(token_sha256)s, %(accelerator)s, %(gpus)s,
        %(model_digest)s, %(per_gpu_hour)s, %(currency)s, now())
ON CONFLICT DO NOTHING
RETURNING id

-- name: jobs_to_advance
-- Jobs that wait and have a slot now, in the order of the queue; those that are ending, in rotation; and of those that
-- run so many, in rotation.
WITH waiting AS (
    SELECT DISTINCT accelerator FROM jobs WHERE gone_at IS NULL AND launch_after <= now()
), slots AS (
    SELECT accelerator,
           coalesce((%(slots)s::jsonb ->> accelerator)::bigint, %(default_slots)s) - (
               SELECT count(*) FROM jobs
               WHERE jobs.accelerator = waiting.accelerator AND gone_at IS NULL AND launch_after IS NULL
           ) AS free
    FROM waiting
), candidates AS (
    SELECT id, seq, CASE WHEN ended_at IS NULL THEN 'running' ELSE 'ending' END AS kind,
           idle_since IS NOT NULL AND ended_at IS NULL AND draining_at IS NULL AS is_idle,
           CASE WHEN ended_at IS NULL THEN seq <= %(after_running)s ELSE seq <= %(after_ending)s END AS is_next_round,
           seq AS position
    FROM jobs WHERE gone_at IS NULL AND launch_after IS NULL
    UNION ALL
    SELECT id, seq, 'waiting', false, false, 0 FROM jobs
    WHERE gone_at IS NULL AND launch_after IS NOT NULL AND draining_at IS NOT NULL
    UNION ALL
    -- The queue is sorted only if there is a free slot.
    SELECT job_queue.id, job_queue.seq, 'waiting', false, false, position
    FROM job_queue JOIN slots USING (accelerator) JOIN jobs USING (id)
    WHERE position <= free AND draining_at IS NULL AND (SELECT max(free) FROM slots) > 0
), placed AS (
    SELECT *, row_number() OVER (PARTITION BY kind ORDER BY is_next_round, position, seq) AS place
    FROM candidates
    WHERE id <> ALL (%(excluded)s::text[]) AND NOT (is_idle AND id = ANY (%(excluded_if_idle)s::text[]))
)
SELECT id, seq, kind, is_idle FROM placed
WHERE place <= CASE WHEN kind = 'running' THEN %(looks)s ELSE %(limit)s END
ORDER BY place, kind DESC

-- name: job_to_reconcile
SELECT id, model, domain, model_key, project_id, accelerator, gpus, created_at, launch_after, launched_at, refused_at,
       running_since, seen_at, idle_since, committed_at, draining_at, ended_at, now() AS read_at,
       EXISTS (SELECT FROM batches
               WHERE batches.model = jobs.model AND batches.domain = jobs.domain
                 AND status = 'in_progress' AND segments_left > 0 AND paused_at IS NULL) AS has_work
FROM jobs WHERE id = %(job_id)s AND gone_at IS NULL

-- name: lock_launches
-- Held from the check of the slots until the launch is recorded, also against another reconciler.
SELECT pg_advisory_xact_lock(%(lock)s)

-- name: may_launch
-- Whether a due job has a free slot. Which jobs take the free slots was decided when they were selected.
SELECT (
           SELECT count(*) FROM jobs
           WHERE jobs.accelerator = job.accelerator AND gone_at IS NULL AND launch_after IS NULL
       ) < coalesce((%(slots)s::jsonb ->> accelerator)::bigint, %(default_slots)s) AS may_launch
FROM jobs AS job WHERE id = %(job_id)s AND gone_at IS NULL AND launch_after <= now()

-- name: set_job_token
UPDATE jobs SET token_sha256 = %(token_sha256)s WHERE id = %(job_id)s AND launch_after IS NOT NULL
RETURNING id

-- name: record_launch
-- Not now(), which is the start of the transaction, before it waited for the lock.
WITH launched AS (
    UPDATE jobs SET launch_after = NULL, refused_at = NULL, launched_at = clock_timestamp()
    WHERE id = %(job_id)s AND launch_after IS NOT NULL
    RETURNING id, project_id, model, domain, created_at
), counted AS (
    INSERT INTO usage_totals AS totals (project_id, model, jobs_launched)
    SELECT coalesce(project_id, ''), model, 1 FROM launched
    ON CONFLICT (project_id, model) DO UPDATE SET jobs_launched = totals.jobs_launched + 1
), turn AS (
    UPDATE projects SET last_launch_at = clock_timestamp() FROM launched WHERE projects.id = project_id
)
INSERT INTO batch_events (batch_id, at, type, data)
SELECT batches.id, clock_timestamp(), 'job.launched',
       jsonb_build_object('job_id', launched.id,
                          'queued_s', round(greatest(0, extract(
                              epoch FROM clock_timestamp() - greatest(launched.created_at, in_progress_at))), 3))
FROM launched CROSS JOIN LATERAL (
    SELECT id, in_progress_at FROM batches
    WHERE batches.model = launched.model AND batches.domain = launched.domain
      AND status = 'in_progress' AND segments_left > 0 AND paused_at IS NULL AND first_leased_at IS NULL
    LIMIT 1000
) AS batches

-- name: postpone_launch
-- Not now(), the start of the transaction: the launch may have taken long.
UPDATE jobs
SET launch_after = clock_timestamp() + make_interval(secs => %(pause_s)s),
    refused_at = CASE WHEN %(refused)s THEN coalesce(refused_at, %(now)s) END
WHERE id = %(job_id)s AND launch_after IS NOT NULL

-- name: record_job_waiting
-- For batches without a lease. The reason can change whenever a node joins or leaves, so an event is at most added
-- every ten minutes.
INSERT INTO batch_events (batch_id, at, type, data)
SELECT batches.id, %(now)s, 'job.waiting', jsonb_build_object('job_id', %(job_id)s::text, 'reason', %(reason)s::text)
FROM batches JOIN jobs USING (model, domain)
WHERE jobs.id = %(job_id)s AND status = 'in_progress' AND segments_left > 0 AND paused_at IS NULL
  AND first_leased_at IS NULL AND NOT EXISTS (
    SELECT FROM (
        SELECT at, data ->> 'reason' AS reason FROM batch_events
        WHERE batch_id = batches.id AND type = 'job.waiting' AND data ->> 'job_id' = %(job_id)s
        ORDER BY batch_events.id DESC LIMIT 1
    ) AS latest
    WHERE reason = %(reason)s OR at > %(now)s - interval '10 min'
  )
LIMIT 100

-- name: record_job_start
UPDATE jobs SET running_since = %(now)s, split_at = %(now)s WHERE id = %(job_id)s AND running_since IS NULL

-- name: lock_batches_to_split
-- In the order of coordinator.sql: batches, then jobs.
SELECT id FROM batches
WHERE id IN (SELECT batch_id FROM job_batches WHERE job_id = ANY (%(job_ids)s) AND tokens > split_tokens)
ORDER BY id
FOR NO KEY UPDATE

-- name: split_gpu_seconds
-- GPU seconds since the last split go to the batches whose tokens were committed meanwhile, by tokens. While the job
-- has leases and commits nothing they wait for the next commit; so do those of its start. While it is idle, and at its
-- end, they are overhead: of the projects whose batches it served, by all their tokens, or of its own project if it
-- served none. Only batches that are locked get a share; a commit meanwhile waits for the next split. The time is that
-- of the database: the clocks of two reconcilers may differ, and no second must count twice.
WITH job AS (
    SELECT id, model, coalesce(project_id, '') AS project_id, idle_since, per_gpu_hour, currency,
           greatest(clock_timestamp(), split_at) AS now,
           gpus * greatest(extract(epoch FROM clock_timestamp() - split_at), 0) AS seconds
    FROM jobs WHERE id = %(job_id)s AND split_at IS NOT NULL
    FOR UPDATE
), shares AS (
    SELECT batch_id, (tokens - split_tokens) / sum(tokens - split_tokens) OVER () AS share
    FROM job_batches WHERE job_id = %(job_id)s AND batch_id = ANY (%(batch_ids)s) AND tokens > split_tokens
), given AS (
    -- A batch has costs in one currency: that of its first seconds with a price. It keeps none after its end without.
    UPDATE batches
    SET gpu_seconds = gpu_seconds + job.seconds * share,
        cost = CASE WHEN job.currency = coalesce(batches.currency, priced_in)
                    THEN coalesce(cost, 0) + round(job.seconds * share * per_gpu_hour / 3600, 9) ELSE cost END,
        currency = coalesce(batches.currency, priced_in)
    FROM job, (
        SELECT shares.*, CASE WHEN status NOT IN ('failed', 'completed', 'expired', 'cancelled') THEN job.currency END
                   AS priced_in
        FROM job, shares JOIN batches ON batches.id = batch_id
    ) AS shares
    WHERE batches.id = batch_id
    RETURNING batches.project_id, batches.model, job.seconds * share AS seconds,
              CASE WHEN job.currency = batches.currency
                   THEN round(job.seconds * share * per_gpu_hour / 3600, 9) ELSE 0 END AS cost,
              coalesce(batches.currency, '') AS currency,
              (coalesce(completed_at, failed_at, expired_at, cancelled_at, now()) AT TIME ZONE 'UTC')::date AS day,
              status IN ('failed', 'completed', 'expired', 'cancelled') AS is_over
), noted AS (
    UPDATE job_batches SET split_tokens = tokens
    WHERE job_id = %(job_id)s AND batch_id = ANY (%(batch_ids)s) AND tokens > split_tokens
), unused AS (
    SELECT * FROM job WHERE NOT EXISTS (SELECT FROM shares) AND (idle_since IS NOT NULL OR %(is_last)s)
), served AS (
    SELECT batches.project_id, sum(tokens) AS tokens
    FROM job_batches JOIN batches ON batches.id = batch_id
    WHERE job_id = %(job_id)s AND tokens > 0 AND EXISTS (SELECT FROM unused)
    GROUP BY batches.project_id
), overhead AS (
    SELECT coalesce(served.project_id, unused.project_id) AS project_id, model,
           seconds * coalesce(tokens / sum(tokens) OVER (), 1) AS seconds, per_gpu_hour, currency, now
    FROM unused LEFT JOIN served ON true
), late AS (
    SELECT day, project_id, model, currency, seconds, 0 AS overhead_seconds, cost, 0 AS overhead_cost
    FROM given WHERE is_over AND model IS NOT NULL
    UNION ALL
    SELECT (now AT TIME ZONE 'UTC')::date, project_id, model, coalesce(currency, ''), 0, seconds, 0,
           coalesce(round(seconds * per_gpu_hour / 3600, 9), 0)
    FROM overhead
), totals AS (
    INSERT INTO usage_totals AS totals (project_id, model, gpu_seconds)
    SELECT project_id, model, sum(seconds + overhead_seconds) FROM late GROUP BY project_id, model ORDER BY 1, 2
    ON CONFLICT (project_id, model) DO UPDATE SET gpu_seconds = totals.gpu_seconds + EXCLUDED.gpu_seconds
    RETURNING project_id
), days AS (
    -- After the totals, as at the end of a batch, so that two transactions cannot wait for each other.
    INSERT INTO daily_usage AS usage (day, project_id, model, currency, gpu_seconds, overhead_gpu_seconds, cost,
                                      overhead_cost)
    SELECT day, project_id, model, currency, sum(seconds), sum(overhead_seconds), sum(cost), sum(overhead_cost)
    FROM late WHERE (SELECT count(*) FROM totals) > 0
    GROUP BY day, project_id, model, currency ORDER BY 1, 2, 3, 4
    ON CONFLICT (day, project_id, model, currency) DO UPDATE SET
        gpu_seconds = usage.gpu_seconds + EXCLUDED.gpu_seconds,
        overhead_gpu_seconds = usage.overhead_gpu_seconds + EXCLUDED.overhead_gpu_seconds,
        cost = usage.cost + EXCLUDED.cost,
        overhead_cost = usage.overhead_cost + EXCLUDED.overhead_cost
)
UPDATE jobs SET split_at = job.now
FROM job
WHERE jobs.id = job.id AND (EXISTS (SELECT FROM shares) OR EXISTS (SELECT FROM unused))

-- name: jobs_of_batch
SELECT job_id FROM job_batches JOIN jobs ON jobs.id = job_id
WHERE batch_id = %(batch_id)s AND tokens > split_tokens AND gpus > 0
ORDER BY job_id

-- name: end_job
-- After lock_domain_of_job and release_leases of coordinator.sql.
UPDATE jobs
SET ended_at = coalesce(ended_at, %(now)s), draining_at = coalesce(draining_at, %(now)s),
    gone_at = CASE WHEN %(is_gone)s THEN %(now)s END, launch_after = NULL, reason = coalesce(reason, %(reason)s)
WHERE id = %(job_id)s AND gone_at IS NULL

-- name: record_failure
-- A job that has committed made progress, so the failures in a row begin anew.
UPDATE domains
SET failures = CASE WHEN %(has_committed)s THEN 1 ELSE failures + 1 END
FROM jobs
WHERE jobs.id = %(job_id)s AND domains.model = jobs.model AND domains.domain = jobs.domain
RETURNING failures

-- name: postpone_domain
UPDATE domains SET not_before = %(not_before)s
FROM jobs
WHERE jobs.id = %(job_id)s AND domains.model = jobs.model AND domains.domain = jobs.domain

-- name: record_job_failure
-- For the batches of its domain that have work.
INSERT INTO batch_events (batch_id, at, type, data)
SELECT batches.id, %(now)s, 'job.ended',
       jsonb_build_object('job_id', %(job_id)s::text, 'reason', %(reason)s::text, 'failures', %(failures)s::integer)
FROM batches JOIN jobs USING (model, domain)
WHERE jobs.id = %(job_id)s AND status = 'in_progress' AND segments_left > 0 AND paused_at IS NULL
ORDER BY batches.seq
LIMIT 1000

-- name: lock_domain
SELECT FROM domains WHERE model = %(model)s AND domain = %(domain)s FOR NO KEY UPDATE

-- name: give_up_batches
-- All batches of a domain that wait, or only those without a commit; after the domain was locked: see coordinator.sql.
WITH due AS (
    SELECT id, %(with_results)s OR last_commit_at IS NULL AS is_given_up FROM batches
    WHERE model = %(model)s AND domain = %(domain)s AND status = 'in_progress' AND segments_left > 0
      AND paused_at IS NULL AND giving_up_at IS NULL
), given_up AS (
    UPDATE batches
    SET giving_up_at = now(), giving_up_code = %(code)s, giving_up_message = %(message)s
    FROM due WHERE batches.id = due.id AND is_given_up AND status = 'in_progress' AND giving_up_at IS NULL
    RETURNING batches.id
), reset AS (
    UPDATE domains SET failures = 0, not_before = NULL
    WHERE model = %(model)s AND domain = %(domain)s AND NOT EXISTS (SELECT FROM due WHERE NOT is_given_up)
)
INSERT INTO batch_events (batch_id, at, type, data)
SELECT id, now(), 'batch.giving_up', jsonb_build_object('code', %(code)s::text, 'reason', %(message)s::text)
FROM given_up

-- name: drain_for_waiting
-- Jobs that make room for a waiting one of the same accelerator when no slot is free: at once the one that is idle for
-- longest, else the one that was launched first, after its turn. A job that is about to lease is not idle.
WITH waiting AS (
    SELECT accelerator
    FROM (
        -- One at a time: a job that is ending makes room already.
        SELECT accelerator, count(*) AS taken, bool_or(draining_at IS NOT NULL OR ended_at IS NOT NULL) AS makes_room
        FROM jobs WHERE gone_at IS NULL AND launch_after IS NULL GROUP BY accelerator
    ) AS used
    WHERE taken >= coalesce((%(slots)s::jsonb ->> accelerator)::bigint, %(default_slots)s) AND NOT makes_room
      AND EXISTS (SELECT FROM jobs
                  WHERE jobs.accelerator = used.accelerator AND gone_at IS NULL AND launch_after <= now())
), present AS (
    SELECT id, accelerator, launched_at,
           CASE WHEN NOT EXISTS (SELECT FROM batches
                                 WHERE batches.model = jobs.model AND batches.domain = jobs.domain
                                   AND status = 'in_progress' AND segments_left > 0 AND paused_at IS NULL)
                THEN idle_since END AS idle_since
    FROM jobs JOIN waiting USING (accelerator) WHERE gone_at IS NULL AND launch_after IS NULL
), chosen AS (
    SELECT DISTINCT ON (accelerator) id FROM present
    WHERE idle_since IS NOT NULL OR launched_at <= now() - make_interval(secs => %(turn_s)s)
    ORDER BY accelerator, idle_since NULLS LAST, launched_at
)
UPDATE jobs SET draining_at = now() FROM chosen WHERE jobs.id = chosen.id
RETURNING jobs.id

-- name: drain_useless_jobs
-- Jobs whose engines run with settings that the catalogue no longer has, jobs of a single batch that has ended, and
-- jobs that wait while nothing is left to do.
UPDATE jobs SET draining_at = now()
WHERE gone_at IS NULL AND draining_at IS NULL AND ended_at IS NULL
  AND (model_key <> ALL (%(model_keys)s)
       OR launch_after IS NOT NULL
          AND (model, domain) NOT IN (SELECT model, domain FROM batches
                                      WHERE status = 'in_progress' AND segments_left > 0 AND paused_at IS NULL
                                        AND domain IS NOT NULL AND model IS NOT NULL)
       OR launch_after IS NULL
          AND EXISTS (SELECT FROM batches WHERE batches.id = jobs.domain AND status <> 'in_progress'))
RETURNING id
