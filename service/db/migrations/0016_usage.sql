-- Cost of batches and jobs, and usage by day, which outlives the batches it was counted from.

-- Price of a GPU for an hour when the job was created. NULL without one.
ALTER TABLE jobs
    ADD COLUMN per_gpu_hour  numeric CHECK (per_gpu_hour >= 0),
    ADD COLUMN currency      text;                 -- ISO 4217, e.g. USD
ALTER TABLE batches
    ADD COLUMN cost          numeric,              -- of its GPU seconds that had a price in this currency
    ADD COLUMN currency      text;

-- A batch counts on the day on which it ended. Only ever added to, until a day is past its retention.
CREATE TABLE daily_usage (
    day                   date NOT NULL,                        -- UTC
    project_id            text NOT NULL,                        -- '' for the stack itself, and for erased projects
    model                 text NOT NULL,
    currency              text NOT NULL,                        -- '' without a price
    batches               bigint NOT NULL DEFAULT 0,
    completed             bigint NOT NULL DEFAULT 0,
    failed                bigint NOT NULL DEFAULT 0,
    input_tokens          bigint NOT NULL DEFAULT 0,
    cached_tokens         bigint NOT NULL DEFAULT 0,
    output_tokens         bigint NOT NULL DEFAULT 0,
    reasoning_tokens      bigint NOT NULL DEFAULT 0,
    gpu_seconds           double precision NOT NULL DEFAULT 0,  -- of its batches
    overhead_gpu_seconds  double precision NOT NULL DEFAULT 0,  -- of jobs that nothing was committed for
    cost                  numeric NOT NULL DEFAULT 0,
    overhead_cost         numeric NOT NULL DEFAULT 0,
    PRIMARY KEY (day, project_id, model, currency)
);
CREATE INDEX daily_usage_by_project ON daily_usage (project_id, day);

INSERT INTO daily_usage (day, project_id, model, currency, batches, completed, failed, input_tokens, cached_tokens,
                         output_tokens, reasoning_tokens, gpu_seconds)
SELECT (coalesce(completed_at, failed_at, expired_at, cancelled_at) AT TIME ZONE 'UTC')::date, project_id, model, '',
       count(*), sum(completed), sum(failed), sum(input_tokens), sum(cached_tokens), sum(output_tokens),
       sum(reasoning_tokens), sum(gpu_seconds)
FROM batches
WHERE status IN ('completed', 'failed', 'expired', 'cancelled') AND model IS NOT NULL
  AND coalesce(completed_at, failed_at, expired_at, cancelled_at) IS NOT NULL
GROUP BY 1, 2, 3;

-- As before, and it counts in the usage of the day.
CREATE OR REPLACE FUNCTION batch_ended() RETURNS trigger LANGUAGE plpgsql AS $$
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
        INSERT INTO daily_usage AS usage (day, project_id, model, currency, batches, completed, failed, input_tokens,
                                          cached_tokens, output_tokens, reasoning_tokens, gpu_seconds, cost)
        VALUES ((coalesce(NEW.completed_at, NEW.failed_at, NEW.expired_at, NEW.cancelled_at, now())
                 AT TIME ZONE 'UTC')::date,
                NEW.project_id, NEW.model, coalesce(NEW.currency, ''), 1, NEW.completed, NEW.failed, NEW.input_tokens,
                NEW.cached_tokens, NEW.output_tokens, NEW.reasoning_tokens, NEW.gpu_seconds, coalesce(NEW.cost, 0))
        ON CONFLICT (day, project_id, model, currency) DO UPDATE SET
            batches = usage.batches + 1,
            completed = usage.completed + EXCLUDED.completed,
            failed = usage.failed + EXCLUDED.failed,
            input_tokens = usage.input_tokens + EXCLUDED.input_tokens,
            cached_tokens = usage.cached_tokens + EXCLUDED.cached_tokens,
            output_tokens = usage.output_tokens + EXCLUDED.output_tokens,
            reasoning_tokens = usage.reasoning_tokens + EXCLUDED.reasoning_tokens,
            gpu_seconds = usage.gpu_seconds + EXCLUDED.gpu_seconds,
            cost = usage.cost + EXCLUDED.cost;
    END IF;
    RETURN NEW;
END $$;

-- A key that sees usage, costs and capacity of the whole stack.
ALTER TABLE api_keys DROP CONSTRAINT api_keys_scopes_check;
ALTER TABLE api_keys ADD CONSTRAINT api_keys_scopes_check
    CHECK (scopes <@ ARRAY['read', 'submit', 'admin', 'operator'] AND cardinality(scopes) > 0);
