-- Leases and commits of jobs. Rows are locked in the order domain, batch, segments (by batch and number), job, so that
-- no two transactions wait for each other. A batch is locked FOR NO KEY UPDATE: a new reference to it need not wait.

-- name: job_by_token
SELECT id, model, domain, model_key, draining_at IS NOT NULL AS is_draining, token_sha256
FROM jobs WHERE token_sha256 = %(token_sha256)s AND ended_at IS NULL

-- name: active_job
SELECT id, model, domain, model_key, draining_at IS NOT NULL AS is_draining
FROM jobs WHERE id = %(job_id)s AND ended_at IS NULL

-- name: lock_domain_of_job
SELECT domains.virtual_time
FROM jobs JOIN domains USING (model, domain)
WHERE jobs.id = %(job_id)s
FOR NO KEY UPDATE OF domains

-- name: committing_job
-- Whether the job runs, and whether its domain has failures to forget.
SELECT coalesce(failures > 0 OR not_before IS NOT NULL, FALSE) AS has_failures
FROM jobs LEFT JOIN domains USING (model, domain)
WHERE jobs.id = %(job_id)s AND ended_at IS NULL

-- name: extend_leases
-- Returns the leases that the job keeps, and those whose segments it has done.
WITH locked AS (
    SELECT segments.batch_id, number, segments.epoch, is_done,
           EXISTS (SELECT FROM batches_at_work WHERE id = segments.batch_id) AS is_running
    FROM unnest(%(batch_ids)s::text[], %(segments)s::bigint[], %(epochs)s::bigint[]) AS held (batch_id, number, epoch)
    JOIN segments USING (batch_id, number)
    WHERE segments.epoch = held.epoch AND (is_done OR job_id = %(job_id)s)
    ORDER BY batch_id, number
    FOR UPDATE OF segments
), extended AS (
    UPDATE segments
    SET job_id = CASE WHEN is_running THEN job_id END,
        leased_until = CASE WHEN is_running THEN now() + make_interval(secs => %(lease_s)s) END
    FROM locked
    WHERE segments.batch_id = locked.batch_id AND segments.number = locked.number AND NOT locked.is_done
)
SELECT batch_id, number AS segment, epoch FROM locked WHERE is_done OR is_running

-- name: projects_to_lease
-- The projects of a domain with segments to lease, in the order of their start tags. Each is found by one look into
-- the index, however many batches it has.
WITH RECURSIVE projects AS (
    (SELECT project_id FROM batches_to_lease WHERE model = %(model)s AND domain = %(domain)s
     ORDER BY project_id LIMIT 1)
    UNION ALL
    SELECT (SELECT project_id FROM batches_to_lease
            WHERE model = %(model)s AND domain = %(domain)s AND project_id > projects.project_id
            ORDER BY project_id LIMIT 1)
    FROM projects WHERE project_id IS NOT NULL
)
SELECT projects.project_id, greatest(%(virtual_time)s, finish) AS start, first.seq
FROM projects
CROSS JOIN LATERAL (
    SELECT seq FROM batches_to_lease
    WHERE model = %(model)s AND domain = %(domain)s AND project_id = projects.project_id
    ORDER BY priority DESC, seq LIMIT 1
) AS first
LEFT JOIN turns ON turns.model = %(model)s AND turns.domain = %(domain)s AND turns.project_id = projects.project_id
WHERE projects.project_id IS NOT NULL
ORDER BY start, seq
LIMIT %(limit)s

-- name: lease_turn
-- Leases the next segments of a project: at least one, and more while they have at most so many tokens together.
-- Batches at risk of their deadline come first. Of more than 1,000 of them, those that are late the longest count.
WITH at_risk AS (
    SELECT id, expires_at, priority, seq FROM batches_to_lease
    WHERE model = %(model)s AND domain = %(domain)s AND project_id = %(project_id)s
        AND at_risk_at < now() AT TIME ZONE 'UTC'
    ORDER BY at_risk_at LIMIT 1000
), others AS (
    SELECT id, priority, seq FROM batches_to_lease
    WHERE model = %(model)s AND domain = %(domain)s AND project_id = %(project_id)s
        AND at_risk_at >= now() AT TIME ZONE 'UTC'
    ORDER BY priority DESC, seq LIMIT %(limit)s
), due AS (
    (SELECT id, expires_at AS deadline, priority, seq FROM at_risk
     ORDER BY deadline, priority DESC, seq LIMIT %(limit)s)
    UNION ALL
    SELECT id, NULL, priority, seq FROM others
), next AS (
    SELECT batch_id, number, row_number() OVER turn AS place, sum(tokens) OVER turn AS tokens_until
    FROM due CROSS JOIN LATERAL (
        SELECT batch_id, number, tokens FROM segments_to_lease WHERE batch_id = due.id ORDER BY number LIMIT %(limit)s
    ) AS first
    WINDOW turn AS (ORDER BY deadline NULLS LAST, priority DESC, seq, number ROWS UNBOUNDED PRECEDING)
    ORDER BY place
    LIMIT %(limit)s
), free AS (
    -- A locked segment is about to be extended or committed.
    SELECT segments.batch_id, segments.number, place
    FROM next JOIN segments USING (batch_id, number)
    WHERE (place = 1 OR tokens_until <= %(tokens)s) AND NOT is_done AND (job_id IS NULL OR leased_until < now())
    FOR UPDATE OF segments SKIP LOCKED
), leased AS (
    UPDATE segments
    SET job_id = %(job_id)s, epoch = epoch + 1, leased_at = now(),
        leased_until = now() + make_interval(secs => %(lease_s)s)
    FROM free
    WHERE segments.batch_id = free.batch_id AND segments.number = free.number
    RETURNING segments.*, place
)
SELECT batch_id, project_id, number AS segment, epoch, endpoint, start_byte, end_byte, rows, tokens, rows_done,
       media_bytes,
       -- The size is NULL for a file that is gone, or that the project does not own.
       CASE WHEN leased.files <> '{}' THEN (
           SELECT jsonb_agg(jsonb_build_array(named.id, files.size_bytes))
           FROM unnest(leased.files) AS named (id)
           LEFT JOIN files ON files.id = named.id AND files.project_id = batches.project_id AND purpose = 'vision'
       ) END AS files
FROM leased JOIN batches ON batches.id = batch_id
ORDER BY place

-- name: record_turns
WITH turned AS (
    INSERT INTO turns (model, domain, project_id, finish)
    SELECT %(model)s, %(domain)s, turn.*
    FROM unnest(%(project_ids)s::text[], %(finishes)s::double precision[]) AS turn (project_id, finish)
    ON CONFLICT (model, domain, project_id) DO UPDATE SET finish = EXCLUDED.finish
)
UPDATE domains SET virtual_time = %(virtual_time)s WHERE model = %(model)s AND domain = %(domain)s

-- name: record_first_leases
-- Of batches that the job had no lease of before. Returns those that no job had a lease of, and what they waited for.
WITH first AS (
    INSERT INTO job_batches (job_id, batch_id) SELECT %(job_id)s, unnest(%(batch_ids)s::text[])
    ON CONFLICT DO NOTHING
    RETURNING batch_id
), leased AS (
    UPDATE batches SET first_leased_at = now() FROM first WHERE id = batch_id AND first_leased_at IS NULL
    RETURNING id, in_progress_at
), event AS (
    INSERT INTO batch_events (batch_id, type, data)
    SELECT batch_id, 'job.running', jsonb_build_object('job_id', %(job_id)s::text) FROM first
)
SELECT leased.id AS batch_id, in_progress_at, launched_at, accelerator
FROM leased JOIN jobs ON jobs.id = %(job_id)s

-- name: record_sync
UPDATE jobs
SET seen_at = now(), engines = %(engines)s,
    idle_since = CASE WHEN NOT EXISTS (
        SELECT FROM segments WHERE job_id = jobs.id AND NOT is_done AND leased_until >= now()
    ) THEN coalesce(idle_since, now()) END
WHERE id = %(job_id)s AND ended_at IS NULL

-- name: backlog_tokens
-- Of so many segments at most, so that a long queue does not slow each sync down.
SELECT coalesce(sum(tokens), 0)::bigint AS tokens
FROM (
    SELECT tokens
    FROM batches_at_work CROSS JOIN LATERAL (
        SELECT tokens FROM segments_to_lease WHERE batch_id = batches_at_work.id LIMIT %(limit)s
    ) AS waiting_of_batch
    WHERE model = %(model)s AND domain = %(domain)s AND segments_left > 0
    LIMIT %(limit)s
) AS waiting

-- name: is_work_left
-- A lease that the job holds counts: it may have missed the answer that gave it. LIMIT makes Postgres begin with these
-- leases, also while it has no statistics of thousands of new segments.
SELECT EXISTS (SELECT FROM batches_to_lease WHERE model = %(model)s AND domain = %(domain)s)
    OR EXISTS (SELECT FROM segments CROSS JOIN LATERAL (
                   SELECT FROM batches_at_work WHERE batches_at_work.id = segments.batch_id LIMIT 1
               ) AS at_work
               WHERE job_id = %(job_id)s AND NOT is_done) AS is_left

-- name: release_leases
WITH locked AS (
    SELECT batch_id, number FROM segments WHERE job_id = %(job_id)s AND NOT is_done
    ORDER BY batch_id, number
    FOR UPDATE
)
UPDATE segments SET job_id = NULL, leased_until = NULL
FROM locked
WHERE segments.batch_id = locked.batch_id AND segments.number = locked.number

-- name: finish_job
UPDATE jobs
SET draining_at = coalesce(draining_at, now()), ended_at = now(), seen_at = now(),
    idle_since = coalesce(idle_since, now()), engines = 0, engine_s = %(engine_s)s, busy_s = %(busy_s)s
WHERE id = %(job_id)s AND ended_at IS NULL

-- name: takes_parts
-- Whether a job may write parts of a batch; no row if it never had a lease of the batch.
SELECT status = 'in_progress' AS takes_parts
FROM job_batches JOIN batches ON id = batch_id
WHERE job_id = %(job_id)s AND batch_id = %(batch_id)s

-- name: lock_batch_of_job
-- No row if the job had no lease of the batch, or the batch is gone. What a paused batch has done counts. A subquery
-- would see the batch as it was before the lock, so the view batches_at_work is not used.
SELECT status = 'in_progress' AND giving_up_at IS NULL AND expires_at > now() AS is_at_work
FROM batches
WHERE id = %(batch_id)s AND EXISTS (SELECT FROM job_batches WHERE job_id = %(job_id)s AND batch_id = %(batch_id)s)
FOR NO KEY UPDATE

-- name: recorded_part
SELECT accepted FROM parts WHERE key = %(key)s

-- name: lock_segments
SELECT number, epoch, job_id, is_done, rows, rows_done FROM segments
WHERE batch_id = %(batch_id)s AND number = ANY (%(numbers)s::bigint[])
ORDER BY number
FOR UPDATE

-- name: record_rows
UPDATE segments
SET rows_done = committed.rows_done, is_done = committed.is_done,
    job_id = CASE WHEN NOT committed.is_done THEN job_id END
FROM unnest(%(numbers)s::integer[], %(rows_done)s::text[], %(is_done)s::boolean[])
    AS committed (number, rows_done, is_done)
WHERE segments.batch_id = %(batch_id)s AND segments.number = committed.number

-- name: record_progress
-- The rate is a mean of the rates between commits in which the last minute weighs most. It begins with that since the
-- first lease: two commits can follow each other at once.
WITH before AS (
    SELECT id, extract(epoch FROM now() - coalesce(progress_at, first_leased_at))::double precision AS passed_s,
           (%(completed)s::bigint + %(failed)s::bigint)::double precision AS rows
    FROM batches WHERE id = %(batch_id)s
)
UPDATE batches
SET completed = completed + %(completed)s, failed = failed + %(failed)s,
    input_tokens = input_tokens + %(input_tokens)s, cached_tokens = cached_tokens + %(cached_tokens)s,
    output_tokens = output_tokens + %(output_tokens)s, reasoning_tokens = reasoning_tokens + %(reasoning_tokens)s,
    segments_left = segments_left - %(segments_done)s, progress_at = now(), last_commit_at = now(),
    rows_per_s = CASE
        WHEN passed_s IS NULL OR passed_s <= 0 THEN rows_per_s
        WHEN rows_per_s IS NULL THEN before.rows / passed_s
        -- At most an hour: where exp() underflows, which is after half a day, Postgres raises an error.
        ELSE rows_per_s * exp(-least(passed_s, 3600) / 60)
             + before.rows / passed_s * (1 - exp(-least(passed_s, 3600) / 60))
    END
FROM before
WHERE batches.id = before.id
RETURNING pg_notify('batch_events', batches.id)

-- name: record_part
WITH part AS (
    INSERT INTO parts (key, batch_id, job_id, accepted, refused_lines)
    VALUES (%(key)s, %(batch_id)s, %(job_id)s, %(accepted)s, %(refused_lines)s::bigint[])
), share AS (
    UPDATE job_batches SET tokens = tokens + %(tokens)s WHERE job_id = %(job_id)s AND batch_id = %(batch_id)s
)
UPDATE jobs
SET seen_at = now(), committed_at = now(),
    idle_since = CASE WHEN NOT EXISTS (
        SELECT FROM segments WHERE job_id = jobs.id AND NOT is_done AND leased_until >= now()
    ) THEN coalesce(idle_since, now()) END
WHERE id = %(job_id)s

-- name: record_refused_commit
UPDATE jobs SET seen_at = now() WHERE id = %(job_id)s

-- name: forget_failures
UPDATE domains SET failures = 0, not_before = NULL
FROM jobs
WHERE jobs.id = %(job_id)s AND domains.model = jobs.model AND domains.domain = jobs.domain
    AND (failures > 0 OR not_before IS NOT NULL)

-- name: give_back_segment
UPDATE segments SET job_id = NULL, leased_until = NULL, failures = failures + 1
WHERE batch_id = %(batch_id)s AND number = %(segment)s AND epoch = %(epoch)s AND job_id = %(job_id)s AND NOT is_done
RETURNING failures

-- name: give_up_batch
WITH given_up AS (
    UPDATE batches SET giving_up_at = now(), giving_up_code = %(code)s, giving_up_message = %(message)s
    WHERE id = %(batch_id)s AND status = 'in_progress' AND giving_up_at IS NULL
    RETURNING id
), event AS (
    INSERT INTO batch_events (batch_id, type, data)
    SELECT id, 'batch.giving_up', jsonb_build_object('code', %(code)s::text, 'reason', %(message)s::text) FROM given_up
)
SELECT pg_notify('batches', id) FROM given_up

-- name: record_given_back
UPDATE jobs
SET seen_at = now(), idle_since = CASE WHEN NOT EXISTS (
        SELECT FROM segments WHERE job_id = jobs.id AND NOT is_done AND leased_until >= now()
    ) THEN coalesce(idle_since, now()) END
WHERE id = %(job_id)s
RETURNING pg_notify('work', model || E'\n' || domain)
