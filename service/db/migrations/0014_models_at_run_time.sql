-- Models that operators enable while the stack runs. The stack file decides which of them count.
CREATE TABLE models_at_run_time (
    id           text PRIMARY KEY,
    digest       text NOT NULL,             -- of the manifest in the object store: sha256:…
    accelerator  text NOT NULL,
    engine_args  jsonb NOT NULL DEFAULT '{}',
    enabled_at   timestamptz NOT NULL DEFAULT now()
);
-- The pushed model that a job loads; NULL for another source. It must stay in the object store until the job is gone.
ALTER TABLE jobs ADD COLUMN model_digest text;
