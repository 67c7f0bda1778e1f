-- Tenancy (scopes, quotas), retention with an audit log, webhooks, progress that can be watched, totals that outlive
-- the batches they were counted from.

-- A limit that is NULL is none. What counts towards a limit is read from the files and batches themselves, so that
-- nothing has to be given back when a batch ends.
ALTER TABLE projects
    ADD COLUMN max_enqueued_requests    bigint  CHECK (max_enqueued_requests >= 0),
    ADD COLUMN max_enqueued_tokens      bigint  CHECK (max_enqueued_tokens >= 0),
    ADD COLUMN max_stored_bytes         bigint  CHECK (max_stored_bytes >= 0),
    ADD COLUMN max_batches_in_progress  integer CHECK (max_batches_in_progress >= 0),
    ADD COLUMN retention_s              bigint  CHECK (retention_s > 0),    -- NULL: the stack's own default
    ADD COLUMN archived_at              timestamptz,                        -- its keys are refused from then on
    ADD COLUMN last_launch_at           timestamptz;                        -- of a job; who waited longest is next

ALTER TABLE api_keys
    ADD COLUMN scopes text[] NOT NULL DEFAULT '{read,submit,admin}'
        CHECK (scopes <@ ARRAY['read', 'submit', 'admin'] AND cardinality(scopes) > 0);
-- A key is looked up by the first bytes of its digest; the whole digest is compared in constant time.
CREATE INDEX api_keys_by_digest ON api_keys (substr(key_sha256, 1, 8));

ALTER TABLE files
    ADD COLUMN line_count  bigint NOT NULL DEFAULT 0,  -- counted while it was uploaded; blank ones too
    ADD COLUMN deleted_by  text;                       -- set with deleted_at where a running batch still reads it
-- A page of a listing compares (project_id, seq) as a pair: both columns have to be sorted the same way.
DROP INDEX files_by_project;
CREATE INDEX files_by_project ON files (project_id, seq) WHERE deleted_at IS NULL;
CREATE INDEX files_stored ON files (project_id) INCLUDE (size_bytes);  -- the sum is read from the index alone
CREATE INDEX files_to_delete ON files (least(deleted_at, expires_at))
    WHERE deleted_at IS NOT NULL OR expires_at IS NOT NULL;

ALTER TABLE batches
    ADD COLUMN idempotency_key    text,
    ADD COLUMN enqueued_requests  bigint NOT NULL DEFAULT 0,   -- the input file's lines, then its valid requests
    ADD COLUMN enqueued_tokens    bigint NOT NULL DEFAULT 0,   -- estimated: a token for each four bytes of input
    ADD COLUMN gpus               integer NOT NULL DEFAULT 0,  -- that its jobs reserve
    ADD COLUMN job_running_since  timestamptz,                 -- of the newest job; NULL while none runs
    ADD COLUMN gpu_seconds        double precision NOT NULL DEFAULT 0,  -- of jobs that have ended
    ADD COLUMN rows_per_s         double precision;            -- over about the last minute; NULL before two reports
CREATE UNIQUE INDEX batches_by_idempotency_key ON batches (project_id, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
DROP INDEX batches_by_project;
CREATE INDEX batches_by_project ON batches (project_id, seq);
CREATE INDEX batches_open_by_project ON batches (project_id, seq)
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE INDEX batches_by_input_file ON batches (input_file_id)
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE INDEX batches_over ON batches (coalesce(completed_at, failed_at, expired_at, cancelled_at))
    WHERE status IN ('completed', 'failed', 'expired', 'cancelled');

-- A creation that a limit refused made no batch: a retry of it is not to find one that the same request made earlier.
CREATE TABLE refused_creations (
    project_id      text NOT NULL REFERENCES projects (id),
    request_sha256  bytea NOT NULL,
    refused_at      timestamptz NOT NULL,
    PRIMARY KEY (project_id, request_sha256)
);

-- What is due to be launched, in the order in which it will be. Projects take turns: a project's first waiting batch
-- comes before another's second, and jobs that run count as turns taken. Among equals the project comes first whose
-- last launch is the longest ago, else one with a long backlog would always be next. Within a project the oldest does.
CREATE VIEW launch_queue AS
WITH running AS (
    SELECT project_id, count(*) AS jobs FROM batches
    WHERE status IN ('in_progress', 'cancelling') AND attempt > 0 AND launch_after IS NULL
    GROUP BY project_id
), due AS (
    SELECT id, project_id, seq, row_number() OVER (PARTITION BY project_id ORDER BY seq) AS place
    FROM batches
    WHERE status = 'in_progress' AND launch_after <= now()
)
SELECT due.id, project_id, seq,
       row_number() OVER (ORDER BY place + coalesce(jobs, 0), last_launch_at NULLS FIRST, seq) AS position
FROM due LEFT JOIN running USING (project_id) JOIN projects ON projects.id = project_id;

-- What was deleted, and who may do what: rows that outlive what they tell of. Only ever added to.
CREATE TABLE audit_log (
    id          text PRIMARY KEY DEFAULT 'audit_log-' || replace(gen_random_uuid()::text, '-', ''),
    seq         bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    at          timestamptz NOT NULL DEFAULT now(),
    project_id  text NOT NULL,
    actor       text NOT NULL,             -- the id of an API key, 'operator' (the command line) or 'retention'
    type        text NOT NULL,             -- e.g. file.deleted, batch.deleted, api_key.created
    object_id   text NOT NULL,
    object_seq  bigint,                    -- of a deleted file or batch: it still is a cursor of a listing
    size_bytes  bigint,
    sha256      bytea,                     -- of a deleted file's content
    data        jsonb NOT NULL DEFAULT '{}'
);
CREATE INDEX audit_log_by_project ON audit_log (project_id, seq);
CREATE INDEX audit_log_by_object ON audit_log (object_id);

CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the audit log can only be added to';
END $$;
CREATE TRIGGER audit_log_only_grows BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change();

-- Webhooks. The secret signs each delivery, so it has to be kept as it is.
CREATE TABLE webhook_endpoints (
    id          text PRIMARY KEY,
    project_id  text NOT NULL REFERENCES projects (id),
    name        text NOT NULL DEFAULT '',
    url         text NOT NULL,
    secret      text NOT NULL,
    events      text[] NOT NULL CHECK (
                    events <@ ARRAY['batch.completed', 'batch.failed', 'batch.expired', 'batch.cancelled']
                    AND cardinality(events) > 0),
    created_at  timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX webhook_endpoints_by_project ON webhook_endpoints (project_id, created_at);

CREATE TABLE webhook_deliveries (
    event_id      text NOT NULL,
    endpoint_id   text NOT NULL REFERENCES webhook_endpoints (id) ON DELETE CASCADE,
    batch_id      text NOT NULL,
    type          text NOT NULL,
    created_at    timestamptz NOT NULL DEFAULT now(),
    attempts      integer NOT NULL DEFAULT 0,
    due_at        timestamptz DEFAULT now(),   -- NULL once it was delivered or given up
    delivered_at  timestamptz,
    last_error    text,
    PRIMARY KEY (event_id, endpoint_id)
);
CREATE INDEX webhook_deliveries_due ON webhook_deliveries (due_at) WHERE due_at IS NOT NULL;

-- Sums over batches that have ended, and jobs that were launched: metrics and bills outlive the batches.
CREATE TABLE usage_totals (
    project_id        text NOT NULL,
    model             text NOT NULL,
    batches           bigint NOT NULL DEFAULT 0,
    completed         bigint NOT NULL DEFAULT 0,
    failed            bigint NOT NULL DEFAULT 0,
    input_tokens      bigint NOT NULL DEFAULT 0,
    cached_tokens     bigint NOT NULL DEFAULT 0,
    output_tokens     bigint NOT NULL DEFAULT 0,
    reasoning_tokens  bigint NOT NULL DEFAULT 0,
    gpu_seconds       double precision NOT NULL DEFAULT 0,
    jobs_launched     bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (project_id, model)
);

-- In the same transaction as the end of a batch: its webhooks are due, and it counts in the totals.
CREATE FUNCTION batch_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO webhook_deliveries (event_id, endpoint_id, batch_id, type)
    SELECT 'evt_' || replace(gen_random_uuid()::text, '-', ''), id, NEW.id, 'batch.' || NEW.status
    FROM webhook_endpoints
    WHERE project_id = NEW.project_id AND 'batch.' || NEW.status = ANY (events);

    IF NEW.model IS NOT NULL THEN
        INSERT INTO usage_totals AS totals (project_id, model, batches, completed, failed, input_tokens, cached_tokens,
                                            output_tokens, reasoning_tokens, gpu_seconds)
        VALUES (NEW.project_id, NEW.model, 1, NEW.completed, NEW.failed, NEW.input_tokens, NEW.cached_tokens,
                NEW.output_tokens, NEW.reasoning_tokens, NEW.gpu_seconds)
        ON CONFLICT (project_id, model) DO UPDATE SET
            batches = totals.batches + 1,
            completed = totals.completed + EXCLUDED.completed,
            failed = totals.failed + EXCLUDED.failed,
            input_tokens = totals.input_tokens + EXCLUDED.input_tokens,
            cached_tokens = totals.cached_tokens + EXCLUDED.cached_tokens,
            output_tokens = totals.output_tokens + EXCLUDED.output_tokens,
            reasoning_tokens = totals.reasoning_tokens + EXCLUDED.reasoning_tokens,
            gpu_seconds = totals.gpu_seconds + EXCLUDED.gpu_seconds;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER batch_ended AFTER UPDATE OF status ON batches FOR EACH ROW
    WHEN (OLD.status IS DISTINCT FROM NEW.status
          AND NEW.status IN ('completed', 'failed', 'expired', 'cancelled'))
    EXECUTE FUNCTION batch_ended();

-- One row: who leads, and when it last looked at all open batches.
CREATE TABLE reconciler_heartbeat (
    only_row  boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    leader    text NOT NULL,
    beat_at   timestamptz NOT NULL
);

-- Who watches a batch hears of each event and of each report of progress on this channel, by the batch's id.
CREATE FUNCTION tell_watchers() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('batch_events', NEW.batch_id);
    RETURN NEW;
END $$;
CREATE TRIGGER batch_event_added AFTER INSERT ON batch_events FOR EACH ROW EXECUTE FUNCTION tell_watchers();

-- As before, and it keeps a rate: a mean of the rates between reports in which the last minute weighs most.
CREATE OR REPLACE FUNCTION report_progress(
    p_batch_id text, p_attempt integer, p_completed bigint, p_failed bigint,
    p_input_tokens bigint, p_cached_tokens bigint, p_output_tokens bigint, p_reasoning_tokens bigint
) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp
AS $$
    WITH before AS (
        SELECT id, rows_per_s,
               extract(epoch FROM now() - progress_at)::double precision AS passed_s,
               (p_completed + p_failed - completed - failed)::double precision AS rows
        FROM batches
        WHERE id = p_batch_id AND attempt = p_attempt AND status = 'in_progress'
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
        WHERE batches.id = before.id
        RETURNING batches.id
    ), told AS (
        SELECT pg_notify('batch_events', id) FROM updated
    )
    SELECT EXISTS (SELECT FROM told)
$$;
