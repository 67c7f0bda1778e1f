-- Deletion by age. The files of a batch stay until it ends.

-- name: shorten_expiries
-- Files whose project, or the stack, was given a lower retention after they were stored.
UPDATE files
SET expires_at = files.created_at + make_interval(secs => coalesce(retention_s, %(retention_s)s))
FROM projects
WHERE projects.id = project_id
  AND expires_at > files.created_at + make_interval(secs => coalesce(retention_s, %(retention_s)s))

-- name: files_to_remove
-- The one that is due for longest comes first.
SELECT id, extract(epoch FROM now() - least(deleted_at, expires_at))::double precision AS due_for_s FROM files
WHERE least(deleted_at, expires_at) <= now()
  AND id <> ALL (%(failed)s)
  AND NOT EXISTS (
    SELECT FROM batches
    WHERE input_file_id = files.id AND project_id = files.project_id
      AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling'))
  AND NOT (purpose = 'vision' AND EXISTS (
    SELECT FROM segments JOIN batches ON batches.id = batch_id
    WHERE segments.files <> '{}' AND segments.files @> ARRAY[files.id] AND batches.project_id = files.project_id
      AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')))
ORDER BY least(deleted_at, expires_at)
LIMIT %(limit)s

-- name: lock_file_to_remove
-- Skips a file that a batch is being created from at this moment; the next sweep finds it in use.
SELECT project_id, deleted_by,
       EXISTS (SELECT FROM projects WHERE projects.id = project_id AND erasing_at IS NOT NULL) AS is_erased
FROM files WHERE id = %(id)s
FOR UPDATE SKIP LOCKED

-- name: batches_to_remove
SELECT batches.id, erasing_at IS NOT NULL AS is_erased
FROM batches JOIN projects ON projects.id = batches.project_id
WHERE status IN ('completed', 'failed', 'expired', 'cancelled') AND parts_deleted_at IS NOT NULL
  AND leftovers_due_at IS NULL
  AND coalesce(completed_at, failed_at, expired_at, cancelled_at)
      <= now() - make_interval(secs => CASE WHEN erasing_at IS NULL
                                            THEN coalesce(projects.retention_s, %(retention_s)s) ELSE 0 END)
  -- Implied by the condition above, and answered by an index.
  AND coalesce(completed_at, failed_at, expired_at, cancelled_at)
      <= now() - make_interval(secs => (
          SELECT min(CASE WHEN erasing_at IS NULL THEN coalesce(retention_s, %(retention_s)s) ELSE 0 END)
          FROM projects))
LIMIT %(limit)s

-- name: batches_with_leftovers
SELECT id FROM batches WHERE leftovers_due_at <= now() AND id <> ALL (%(failed)s)
ORDER BY leftovers_due_at
LIMIT %(limit)s

-- name: record_leftovers_deleted
UPDATE batches SET leftovers_due_at = NULL WHERE id = %(id)s

-- name: remove_batches
-- Deletes their errors and events too, by foreign key.
WITH removed AS (
    DELETE FROM batches WHERE id = ANY (%(ids)s)
    RETURNING *
), noted AS (
    INSERT INTO audit_log (project_id, actor, type, object_id, object_seq, data)
    SELECT project_id, %(actor)s, 'batch.deleted', id, seq,
           jsonb_build_object(
               'status', status, 'created_at', created_at,
               'request_counts', jsonb_build_object('total', total, 'completed', completed, 'failed', failed))
    FROM removed
)
SELECT id, project_id FROM removed

-- name: remove_old_deliveries
-- Finished deliveries are kept for a month, so that operators can look up their errors.
DELETE FROM webhook_deliveries
WHERE (event_id, endpoint_id) IN (
    SELECT event_id, endpoint_id FROM webhook_deliveries
    WHERE due_at IS NULL AND created_at <= now() - interval '30 days'
    LIMIT %(limit)s)

-- name: remove_old_usage
DELETE FROM daily_usage WHERE day < (now() AT TIME ZONE 'UTC')::date - %(days)s::integer
