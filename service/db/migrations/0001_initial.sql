-- The first schema: projects and their API keys, files, batches, and what happened to each batch.

CREATE TABLE projects (
    id          text PRIMARY KEY,
    name        text NOT NULL UNIQUE,
    created_at  timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE api_keys (
    id          text PRIMARY KEY,
    project_id  text NOT NULL REFERENCES projects (id),
    name        text NOT NULL,
    key_sha256  bytea NOT NULL UNIQUE,
    hint        text NOT NULL,                       -- the last four characters, to tell keys apart
    created_at  timestamptz NOT NULL DEFAULT now(),
    expires_at  timestamptz,
    revoked_at  timestamptz
);

-- seq orders files and batches that were created in the same microsecond, so that a cursor never drops one.
CREATE TABLE files (
    id          text PRIMARY KEY,
    seq         bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    project_id  text NOT NULL REFERENCES projects (id),
    purpose     text NOT NULL,
    filename    text NOT NULL,
    size_bytes  bigint NOT NULL,
    sha256      bytea NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    expires_at  timestamptz,
    deleted_at  timestamptz
);
CREATE INDEX files_by_project ON files (project_id, seq DESC) WHERE deleted_at IS NULL;

CREATE TABLE batches (
    id                      text PRIMARY KEY,
    seq                     bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    project_id              text NOT NULL REFERENCES projects (id),
    endpoint                text NOT NULL,
    input_file_id           text NOT NULL,           -- may name a file that does not exist: the batch then fails
    completion_window       text NOT NULL,
    metadata                jsonb,
    output_expires_after_s  bigint,
    request_sha256          bytea NOT NULL,          -- of the creation request, to recognise a retry of it
    status                  text NOT NULL DEFAULT 'validating' CHECK (status IN (
                                'validating', 'failed', 'in_progress', 'finalizing', 'completed',
                                'expired', 'cancelling', 'cancelled')),
    model                   text,
    output_file_id          text,
    error_file_id           text,
    created_at              timestamptz NOT NULL DEFAULT now(),
    expires_at              timestamptz NOT NULL,
    in_progress_at          timestamptz,
    finalizing_at           timestamptz,
    completed_at            timestamptz,
    failed_at               timestamptz,
    expired_at              timestamptz,
    cancelling_at           timestamptz,
    cancelled_at            timestamptz,
    -- request_counts; error_count counts every validation error, batch_errors lists at most 1,000 of them
    total                   bigint NOT NULL DEFAULT 0,
    completed               bigint NOT NULL DEFAULT 0,
    failed                  bigint NOT NULL DEFAULT 0,
    error_count             bigint NOT NULL DEFAULT 0,
    input_tokens            bigint NOT NULL DEFAULT 0,
    cached_tokens           bigint NOT NULL DEFAULT 0,
    output_tokens           bigint NOT NULL DEFAULT 0,
    reasoning_tokens        bigint NOT NULL DEFAULT 0,
    -- the job: attempt 0 means that none was launched yet
    attempt                 integer NOT NULL DEFAULT 0,
    failed_attempts         integer NOT NULL DEFAULT 0,  -- in a row, without a new committed line between them
    committed_parts         bigint NOT NULL DEFAULT 0,   -- part objects that were there when the last attempt failed
    launch_after            timestamptz,                 -- the launch is due then; null once the launcher has the job
    parts_deleted_at        timestamptz,                 -- the end of all work on a batch
    progress_at             timestamptz
);
CREATE INDEX batches_by_project ON batches (project_id, seq DESC);
CREATE INDEX batches_open ON batches (seq) WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE INDEX batches_to_reconcile ON batches (seq) WHERE parts_deleted_at IS NULL;
CREATE INDEX batches_by_request ON batches (project_id, request_sha256, created_at DESC);

CREATE TABLE batch_errors (
    batch_id  text NOT NULL REFERENCES batches (id) ON DELETE CASCADE,
    ordinal   integer NOT NULL,
    code      text NOT NULL,
    message   text NOT NULL,
    param     text,
    line      bigint,
    PRIMARY KEY (batch_id, ordinal)
);

CREATE TABLE batch_events (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    batch_id  text NOT NULL REFERENCES batches (id) ON DELETE CASCADE,
    at        timestamptz NOT NULL DEFAULT now(),
    type      text NOT NULL,                         -- e.g. batch.in_progress, job.launched, job.failed
    data      jsonb NOT NULL DEFAULT '{}'
);
CREATE INDEX batch_events_by_batch ON batch_events (batch_id, id);

-- The only thing a Ray job may do in this database. Totals, not increments: a repeated call is harmless.
-- Returns false when the attempt is not the current one any more or the batch no longer runs, so that
-- the job can stop.
CREATE FUNCTION report_progress(
    p_batch_id text, p_attempt integer, p_completed bigint, p_failed bigint,
    p_input_tokens bigint, p_cached_tokens bigint, p_output_tokens bigint, p_reasoning_tokens bigint
) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp
AS $$
    WITH updated AS (
        UPDATE batches
        SET completed = p_completed, failed = p_failed,
            input_tokens = p_input_tokens, cached_tokens = p_cached_tokens,
            output_tokens = p_output_tokens, reasoning_tokens = p_reasoning_tokens,
            progress_at = now()
        WHERE id = p_batch_id AND attempt = p_attempt AND status = 'in_progress'
        RETURNING 1
    )
    SELECT EXISTS (SELECT FROM updated)
$$;
REVOKE ALL ON FUNCTION report_progress FROM PUBLIC;

-- A creation or a cancel wakes the reconciler; it need not poll for them.
CREATE FUNCTION wake_reconciler() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('batches', NEW.id);
    RETURN NEW;
END $$;
CREATE TRIGGER batch_created AFTER INSERT ON batches FOR EACH ROW EXECUTE FUNCTION wake_reconciler();
CREATE TRIGGER batch_status_changed AFTER UPDATE OF status ON batches FOR EACH ROW
    WHEN (OLD.status IS DISTINCT FROM NEW.status) EXECUTE FUNCTION wake_reconciler();
