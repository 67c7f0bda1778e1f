-- A batch is finalized as soon as all its lines are reported, while its job is still ending.
ALTER TABLE batches
    ADD COLUMN job_ending_since     timestamptz,  -- finalizing began without the job's end; NULL once that was observed
    ADD COLUMN misreported_attempt  integer;      -- the attempt that reported all lines although results were missing

-- Jobs that hold a slot of the launcher: those that run, and those that are ending beside finalizing.
CREATE VIEW running_jobs AS
SELECT id, project_id FROM batches
WHERE parts_deleted_at IS NULL  -- implied by the rest, and answered by an index
  AND (job_ending_since IS NOT NULL
       OR status IN ('in_progress', 'cancelling') AND attempt > 0 AND launch_after IS NULL);

-- As before; a job that is ending counts as a turn taken.
CREATE OR REPLACE VIEW launch_queue AS
WITH running AS (
    SELECT project_id, count(*) AS jobs FROM running_jobs GROUP BY project_id
), due AS (
    SELECT id, project_id, seq, row_number() OVER (PARTITION BY project_id ORDER BY seq) AS place
    FROM batches
    WHERE status = 'in_progress' AND launch_after <= now()
)
SELECT due.id, project_id, seq,
       row_number() OVER (ORDER BY place + coalesce(jobs, 0), last_launch_at NULLS FIRST, seq) AS position
FROM due LEFT JOIN running USING (project_id) JOIN projects ON projects.id = project_id;

-- As before, and it wakes the reconciler when the last line is reported. A job that is ending gets true: it is not
-- superseded. Its batch may have gone to finalizing while this function waited for the row, so the row is read locked.
CREATE OR REPLACE FUNCTION report_progress(
    p_batch_id text, p_attempt integer, p_completed bigint, p_failed bigint,
    p_input_tokens bigint, p_cached_tokens bigint, p_output_tokens bigint, p_reasoning_tokens bigint
) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp
AS $$
    WITH before AS (
        SELECT id, status, job_ending_since, rows_per_s,
               extract(epoch FROM now() - progress_at)::double precision AS passed_s,
               (p_completed + p_failed - completed - failed)::double precision AS rows,
               p_completed + p_failed >= total AND completed + failed < total AS is_last
        FROM batches
        WHERE id = p_batch_id AND attempt = p_attempt
        FOR UPDATE
    ), updated AS (
        UPDATE batches
        SET completed = p_completed, failed = p_failed,
            input_tokens = p_input_tokens, cached_tokens = p_cached_tokens,
            output_tokens = p_output_tokens, reasoning_tokens = p_reasoning_tokens,
            progress_at = now(),
            rows_per_s = CASE
                WHEN passed_s IS NULL OR passed_s <= 0 OR before.rows < 0 THEN before.rows_per_s
                WHEN before.rows_per_s IS NULL THEN before.rows / passed_s
                ELSE before.rows_per_s * exp(-passed_s / 60) + before.rows / passed_s * (1 - exp(-passed_s / 60))
            END
        FROM before
        WHERE batches.id = before.id AND before.status = 'in_progress'
        RETURNING batches.id, before.is_last
    ), told AS (
        SELECT pg_notify('batch_events', id), CASE WHEN is_last THEN pg_notify('batches', id) END FROM updated
    )
    SELECT EXISTS (SELECT FROM told) OR EXISTS (SELECT FROM before WHERE job_ending_since IS NOT NULL)
$$;

-- Its slot is free: the next job can be launched.
CREATE TRIGGER job_ended AFTER UPDATE OF job_ending_since ON batches FOR EACH ROW
    WHEN (OLD.job_ending_since IS NOT NULL AND NEW.job_ending_since IS NULL)
    EXECUTE FUNCTION wake_reconciler();
