-- A paused batch keeps its state; its job is stopped and none is launched. Priority orders the batches of one project.
ALTER TABLE batches
    ADD COLUMN priority        smallint NOT NULL DEFAULT 0,  -- the highest of a project is launched first
    ADD COLUMN paused_at       timestamptz,                  -- NULL unless it is paused
    ADD COLUMN paused_attempt  integer;                      -- the attempt that a pause ended, which is no failure

-- As before, without paused batches, and by priority within each project.
CREATE OR REPLACE VIEW launch_queue AS
WITH running AS (
    SELECT project_id, count(*) AS jobs FROM running_jobs GROUP BY project_id
), due AS (
    SELECT id, project_id, seq, row_number() OVER (PARTITION BY project_id ORDER BY priority DESC, seq) AS place
    FROM batches
    WHERE status = 'in_progress' AND launch_after <= now() AND paused_at IS NULL
)
SELECT due.id, project_id, seq,
       row_number() OVER (ORDER BY place + coalesce(jobs, 0), last_launch_at NULLS FIRST, seq) AS position
FROM due LEFT JOIN running USING (project_id) JOIN projects ON projects.id = project_id;

-- As before, and the job of a paused batch gets false, after its totals were recorded: it ends.
CREATE OR REPLACE FUNCTION report_progress(
    p_batch_id text, p_attempt integer, p_completed bigint, p_failed bigint,
    p_input_tokens bigint, p_cached_tokens bigint, p_output_tokens bigint, p_reasoning_tokens bigint
) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp
AS $$
    WITH before AS (
        SELECT id, status, job_ending_since, rows_per_s, paused_at,
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
        RETURNING batches.id, before.is_last, p_completed + p_failed < total AND before.paused_at IS NOT NULL AS must_end
    ), told AS (
        SELECT must_end, pg_notify('batch_events', id), CASE WHEN is_last THEN pg_notify('batches', id) END FROM updated
    )
    SELECT EXISTS (SELECT FROM told WHERE NOT must_end)
        OR EXISTS (SELECT FROM before WHERE job_ending_since IS NOT NULL)
$$;

CREATE TRIGGER batch_paused_or_resumed AFTER UPDATE OF paused_at ON batches FOR EACH ROW
    WHEN (OLD.paused_at IS DISTINCT FROM NEW.paused_at) EXECUTE FUNCTION wake_reconciler();
