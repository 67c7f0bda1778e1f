-- Models that operators enable while the stack runs, and what uses a pushed model.

-- name: models_at_run_time
SELECT id, digest, accelerator, engine_args FROM models_at_run_time ORDER BY enabled_at, id

-- name: lock_models_at_run_time
-- One operator at a time: a model must not be enabled while its files are being removed.
LOCK TABLE models_at_run_time IN SHARE ROW EXCLUSIVE MODE

-- name: open_batches_of_model
SELECT count(*) AS batches FROM batches
WHERE model = %(id)s AND status IN ('validating', 'in_progress')

-- name: enable_model
INSERT INTO models_at_run_time (id, digest, accelerator, engine_args)
VALUES (%(id)s, %(digest)s, %(accelerator)s, %(engine_args)s)
ON CONFLICT (id) DO UPDATE SET digest = EXCLUDED.digest, accelerator = EXCLUDED.accelerator,
    engine_args = EXCLUDED.engine_args, enabled_at = now()

-- name: disable_model
DELETE FROM models_at_run_time WHERE id = %(id)s

-- name: users_of_model
-- Models that are enabled at run time, and jobs that are present, with a digest.
SELECT 'the model ' || id AS name FROM models_at_run_time WHERE digest = %(digest)s
UNION ALL
SELECT 'the job ' || id FROM jobs WHERE model_digest = %(digest)s AND gone_at IS NULL
ORDER BY name
