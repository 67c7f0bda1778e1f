-- Receipts of deletions.

-- name: insert_receipt
INSERT INTO receipts (id, project_id, object_id, envelope)
VALUES (%(id)s, %(project_id)s, %(object_id)s, %(envelope)s)

-- name: receipt_by_id
-- Operators see the receipts of all projects, and of orphans.
SELECT envelope FROM receipts WHERE id = %(id)s AND (%(project_id)s::text IS NULL OR project_id = %(project_id)s)

-- name: receipt_cursor
SELECT seq FROM receipts WHERE id = %(id)s AND project_id = %(project_id)s

-- name: list_receipts
SELECT envelope FROM receipts
WHERE (project_id, seq) < (%(project_id)s, %(cursor)s) AND (project_id, seq) > (%(project_id)s, 0)
  AND (%(object_id)s::text IS NULL OR object_id = %(object_id)s)
ORDER BY project_id DESC, seq DESC
LIMIT %(limit)s

-- name: all_receipts
SELECT envelope FROM receipts
WHERE (%(project_id)s::text IS NULL OR project_id = %(project_id)s)
  AND (%(object_id)s::text IS NULL OR object_id = %(object_id)s)
ORDER BY seq
