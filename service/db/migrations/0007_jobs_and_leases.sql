-- Jobs that serve a model for a sharing domain, and the segments of batches that they lease. What the previous version
-- needs stays: the views launch_queue and running_jobs, and the function report_progress.

ALTER TABLE batches
    ADD COLUMN domain           text,         -- the sharing domain: 'stack', a project or a batch; NULL before the plan
    ADD COLUMN segments_left    integer,      -- segments with rows that are not committed; NULL before the plan
    ADD COLUMN first_leased_at  timestamptz,
    ADD COLUMN last_commit_at   timestamptz,
    ADD COLUMN leftovers_due_at timestamptz,  -- parts that jobs wrote after its end are deleted then
    -- From then on it is at risk of missing its deadline: twice its estimated duration before it. In UTC, because the
    -- time zone of a session must not change a stored value.
    ADD COLUMN at_risk_at       timestamp NOT NULL GENERATED ALWAYS AS (
        (expires_at AT TIME ZONE 'UTC') - make_interval(
            secs => least(coalesce(2 * (estimate ->> 'duration_s')::double precision, 1800), 1e8))) STORED;
-- Batches that a step may advance: see batches_to_advance.
CREATE INDEX batches_due ON batches (seq)
    WHERE parts_deleted_at IS NULL
      AND (status <> 'in_progress' OR coalesce(segments_left, 0) = 0 OR giving_up_at IS NOT NULL);
CREATE INDEX batches_by_deadline ON batches (expires_at) WHERE status = 'in_progress';
CREATE INDEX batches_with_leftovers ON batches (leftovers_due_at) WHERE leftovers_due_at IS NOT NULL;

-- What waits for a job, by domain; and the batches of a project in the order in which they are leased.
CREATE INDEX batches_with_work ON batches (model, domain, project_id, priority DESC, seq)
    WHERE status = 'in_progress' AND segments_left > 0 AND paused_at IS NULL;
CREATE INDEX batches_at_risk ON batches (model, domain, project_id, at_risk_at)
    WHERE status = 'in_progress' AND segments_left > 0 AND paused_at IS NULL;

-- A row for each model and sharing domain that ever had work.
CREATE TABLE domains (
    model         text NOT NULL,
    domain        text NOT NULL,
    virtual_time  double precision NOT NULL DEFAULT 0,  -- of start-time fair queueing: tokens per project
    failures      integer NOT NULL DEFAULT 0,           -- of its jobs in a row, without a commit between them
    not_before    timestamptz,                          -- the next job is not due earlier
    PRIMARY KEY (model, domain)
);
CREATE INDEX domains_postponed ON domains (not_before) WHERE not_before IS NOT NULL;

-- The turns of projects in a domain: the project with the smallest finish is next.
CREATE TABLE turns (
    model       text NOT NULL,
    domain      text NOT NULL,
    project_id  text NOT NULL REFERENCES projects (id),
    finish      double precision NOT NULL DEFAULT 0,
    PRIMARY KEY (model, domain, project_id),
    FOREIGN KEY (model, domain) REFERENCES domains (model, domain)
);

CREATE TABLE jobs (
    id            text PRIMARY KEY,
    seq           bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    model         text NOT NULL,
    domain        text NOT NULL,
    model_key     text NOT NULL,                     -- a digest of the model's settings that it runs with
    project_id    text REFERENCES projects (id),     -- whose turn its launch takes
    token_sha256  bytea NOT NULL UNIQUE,
    accelerator   text NOT NULL DEFAULT 'cpu',       -- slots are limited for each
    gpus          integer NOT NULL DEFAULT 0,        -- that it reserves
    created_at    timestamptz NOT NULL DEFAULT now(),
    launch_after  timestamptz,                       -- the launch is due then; NULL once the launcher has the job
    refused_at    timestamptz,                       -- the first time that the launcher refused it
    launched_at   timestamptz,
    running_since timestamptz,                       -- its GPU seconds count from then on
    seen_at       timestamptz,                       -- its last request to the coordinator
    idle_since    timestamptz,                       -- it holds no lease since then; NULL while it does
    committed_at  timestamptz,                       -- its last commit
    draining_at   timestamptz,                       -- it takes no more work
    ended_at      timestamptz,                       -- its token is void from then on
    gone_at       timestamptz,                       -- the launcher reported its end: its slot is free
    engines       integer NOT NULL DEFAULT 0,        -- that are ready
    engine_s      double precision NOT NULL DEFAULT 0,
    busy_s        double precision NOT NULL DEFAULT 0,
    split_at      timestamptz,                       -- its GPU seconds until then were given to batches
    reason        text,                              -- why it ended, unless it ended by itself
    FOREIGN KEY (model, domain) REFERENCES domains (model, domain)
);
-- A domain has at most one job that takes work.
CREATE UNIQUE INDEX jobs_taking_work ON jobs (model, domain) WHERE draining_at IS NULL AND ended_at IS NULL;
CREATE INDEX jobs_present ON jobs (seq) WHERE gone_at IS NULL;
-- Jobs that hold slots, and all jobs in the queue, of which there may be thousands.
CREATE INDEX jobs_with_slot ON jobs (accelerator, project_id) WHERE gone_at IS NULL AND launch_after IS NULL;
CREATE INDEX jobs_by_turn ON jobs (accelerator, project_id, seq) INCLUDE (launch_after) WHERE gone_at IS NULL;

CREATE TABLE segments (
    batch_id      text NOT NULL REFERENCES batches (id) ON DELETE CASCADE,
    number        integer NOT NULL,                  -- in the plan, from 0
    start_byte    bigint NOT NULL,
    end_byte      bigint NOT NULL,
    rows          integer NOT NULL,
    tokens        bigint NOT NULL,                   -- about how many its rows take
    rows_done     text NOT NULL DEFAULT '0',         -- committed rows as a bitmap: see ray_job.contract.plans
    is_done       boolean NOT NULL DEFAULT false,
    job_id        text REFERENCES jobs (id),         -- who leases it
    epoch         integer NOT NULL DEFAULT 0,        -- of its newest lease
    leased_at     timestamptz,
    leased_until  timestamptz,
    failures      integer NOT NULL DEFAULT 0,        -- how often a job gave it back
    PRIMARY KEY (batch_id, number)
);
CREATE INDEX segments_left ON segments (batch_id, number) WHERE NOT is_done;
CREATE INDEX segments_leased ON segments (job_id) WHERE job_id IS NOT NULL AND NOT is_done;

-- Segments that a job may lease; batches that may be worked on, and those of them with segments to lease.
CREATE VIEW segments_to_lease AS
SELECT batch_id, number, tokens FROM segments
WHERE NOT is_done AND (job_id IS NULL OR leased_until < now());
CREATE VIEW batches_at_work AS
SELECT id, model, domain, project_id, priority, seq, expires_at, at_risk_at, segments_left FROM batches
WHERE status = 'in_progress' AND paused_at IS NULL AND giving_up_at IS NULL AND expires_at > now();
CREATE VIEW batches_to_lease AS
SELECT id, model, domain, project_id, priority, seq, expires_at, at_risk_at FROM batches_at_work
WHERE segments_left > 0 AND EXISTS (SELECT FROM segments_to_lease WHERE batch_id = batches_at_work.id);

-- The parts that count.
CREATE TABLE parts (
    key            text PRIMARY KEY,
    batch_id       text NOT NULL REFERENCES batches (id) ON DELETE CASCADE,
    job_id         text REFERENCES jobs (id),        -- NULL for a part of an earlier version
    accepted       boolean[] NOT NULL,               -- the answer to the commit, by its segments
    refused_lines  bigint[] NOT NULL DEFAULT '{}'    -- lines of the part that do not count
);
CREATE INDEX parts_by_batch ON parts (batch_id);

-- Tokens that a job committed for a batch. Its GPU seconds are split by them.
CREATE TABLE job_batches (
    job_id        text NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    batch_id      text NOT NULL REFERENCES batches (id) ON DELETE CASCADE,
    tokens        bigint NOT NULL DEFAULT 0,
    split_tokens  bigint NOT NULL DEFAULT 0,         -- those for which GPU seconds were given
    PRIMARY KEY (job_id, batch_id)
);
CREATE INDEX job_batches_by_batch ON job_batches (batch_id);

-- What is due to be launched, in the order in which it will be, for each accelerator. Projects take turns: a project's
-- first waiting job comes before another's second, and jobs that hold slots count as turns taken. Among equals the
-- project comes first whose last launch is the longest ago.
CREATE VIEW job_queue AS
WITH running AS (
    SELECT project_id, accelerator, count(*) AS jobs FROM jobs
    WHERE gone_at IS NULL AND launch_after IS NULL
    GROUP BY project_id, accelerator
), due AS (
    SELECT id, project_id, accelerator, seq,
           row_number() OVER (PARTITION BY project_id, accelerator ORDER BY seq) AS place
    FROM jobs
    WHERE gone_at IS NULL AND launch_after <= now()
)
SELECT due.id, project_id, accelerator, seq,
       row_number() OVER (PARTITION BY accelerator
                          ORDER BY place + coalesce(jobs, 0), last_launch_at NULLS FIRST, seq) AS position
FROM due LEFT JOIN running USING (project_id, accelerator) LEFT JOIN projects ON projects.id = project_id;

-- The position of one job in job_queue, without sorting the queue: the jobs of each project are counted whose turn is
-- earlier, and those that have the same turn and come first nevertheless. NULL if the job is not due.
CREATE FUNCTION queue_position(p_job_id text) RETURNS bigint LANGUAGE sql STABLE AS $$
    WITH mine AS (
        SELECT accelerator, project_id, jobs.seq, last_launch_at
        FROM jobs LEFT JOIN projects ON projects.id = project_id
        WHERE jobs.id = p_job_id AND gone_at IS NULL AND launch_after <= now()
    ), counted AS (
        SELECT jobs.project_id,
               count(*) FILTER (WHERE launch_after <= now()) AS due,
               count(*) FILTER (WHERE launch_after IS NULL AND jobs.project_id IS NOT NULL) AS running,
               count(*) FILTER (WHERE launch_after <= now() AND jobs.seq <= mine.seq) AS due_until_mine
        FROM jobs JOIN mine USING (accelerator)
        WHERE gone_at IS NULL
        GROUP BY jobs.project_id
    ), turn AS (
        SELECT running + due_until_mine AS of_mine
        FROM counted JOIN mine ON counted.project_id IS NOT DISTINCT FROM mine.project_id
    )
    SELECT 1 + sum(least(due, greatest(of_mine - running - 1, 0)))::bigint + count(*) FILTER (
        WHERE counted.project_id IS DISTINCT FROM mine.project_id AND of_mine - running BETWEEN 1 AND due
          AND CASE WHEN projects.last_launch_at IS NOT DISTINCT FROM mine.last_launch_at
                   THEN mine.seq > (SELECT seq FROM jobs
                                    WHERE accelerator = mine.accelerator AND gone_at IS NULL AND launch_after <= now()
                                      AND project_id IS NOT DISTINCT FROM counted.project_id
                                    ORDER BY seq OFFSET of_mine - running - 1 LIMIT 1)
                   ELSE coalesce(projects.last_launch_at < mine.last_launch_at, projects.last_launch_at IS NULL) END)
    FROM mine CROSS JOIN turn CROSS JOIN counted LEFT JOIN projects ON projects.id = counted.project_id
    -- Without the job there is one row of the aggregate, and no position.
    HAVING count(*) > 0
$$;

-- Coordinators hear of new work of a domain, and of batches whose leases are lost. The reconciler hears of a batch
-- without segments left.
CREATE FUNCTION tell_coordinators() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.domain IS NOT NULL THEN
        PERFORM pg_notify('work', NEW.model || E'\n' || NEW.domain);
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER batch_work_changed AFTER UPDATE OF status, paused_at, giving_up_at ON batches FOR EACH ROW
    WHEN ((OLD.status, OLD.paused_at, OLD.giving_up_at) IS DISTINCT FROM (NEW.status, NEW.paused_at, NEW.giving_up_at))
    EXECUTE FUNCTION tell_coordinators();
CREATE TRIGGER batch_segments_done AFTER UPDATE OF segments_left ON batches FOR EACH ROW
    WHEN (OLD.segments_left > 0 AND NEW.segments_left = 0) EXECUTE FUNCTION wake_reconciler();

CREATE FUNCTION tell_of_job() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('batches', NEW.id);
    PERFORM pg_notify('work', NEW.model || E'\n' || NEW.domain);
    RETURN NEW;
END $$;
CREATE TRIGGER job_changed AFTER UPDATE OF draining_at, ended_at, gone_at ON jobs FOR EACH ROW
    EXECUTE FUNCTION tell_of_job();
