-- The search for objects that belong to nothing; see service.reconciler.orphans.

-- name: orphan_search
SELECT stack_id, last_key, due_at <= now() AS is_due FROM orphan_search

-- name: record_orphan_search
UPDATE orphan_search SET last_key = %(last_key)s, due_at = now() + make_interval(secs => %(pause_s)s)

-- name: owners_of_objects
-- Which of these ids are in use: files, batches until their leftovers are deleted, jobs whose report on prompts may
-- still be read, and result files that are being assembled, whose rows come with the end of their batch
-- (service.reconciler.records.Batch.result_file_id).
SELECT id FROM files WHERE id = ANY (%(ids)s)
UNION ALL
SELECT id FROM batches
WHERE id = ANY (%(ids)s) AND (parts_deleted_at IS NULL OR leftovers_due_at IS NOT NULL)
UNION ALL
SELECT id FROM jobs
WHERE id = ANY (%(ids)s) AND (gone_at IS NULL OR EXISTS (SELECT FROM parts WHERE parts.job_id = jobs.id))
UNION ALL
SELECT file_id FROM (
    SELECT 'file-' || left(encode(sha256(convert_to(id || ':' || kind, 'UTF8')), 'hex'), 32) AS file_id
    FROM batches CROSS JOIN (VALUES ('output'), ('error')) AS kinds (kind)
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
      AND (status <> 'in_progress' OR giving_up_at IS NOT NULL)
) AS assembled
WHERE file_id = ANY (%(ids)s)

-- name: insert_orphan
INSERT INTO orphans (key, size_bytes, sha256) VALUES (%(key)s, %(size_bytes)s, %(sha256)s) ON CONFLICT DO NOTHING

-- name: known_orphans
SELECT key, size_bytes, sha256 FROM orphans ORDER BY key

-- name: remove_orphan
DELETE FROM orphans WHERE key = %(key)s RETURNING size_bytes, sha256

-- name: project_of_batch
SELECT project_id FROM batches WHERE id = %(id)s
