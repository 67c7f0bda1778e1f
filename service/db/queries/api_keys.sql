-- Projects and their API keys.

-- name: insert_project
INSERT INTO projects (id, name, max_batches_in_progress, max_enqueued_requests, max_enqueued_tokens, max_stored_bytes,
                      retention_s)
VALUES (%(id)s, %(name)s, %(max_batches_in_progress)s, %(max_enqueued_requests)s, %(max_enqueued_tokens)s,
        %(max_stored_bytes)s, %(retention_s)s)

-- name: ensure_project
INSERT INTO projects (id, name) VALUES (%(id)s, %(name)s)
ON CONFLICT (name) DO UPDATE SET name = EXCLUDED.name  -- changes nothing, but makes RETURNING return the row
RETURNING id, name

-- name: project_by_name
SELECT id, name FROM projects WHERE name = %(name)s OR id = %(name)s

-- name: open_projects
SELECT id, name FROM projects WHERE name = ANY (%(names)s) AND archived_at IS NULL ORDER BY name

-- name: list_projects
SELECT projects.*, batches, requests, tokens, stored_bytes
FROM projects
CROSS JOIN LATERAL (
    SELECT count(*) AS batches,
           coalesce(sum(enqueued_requests), 0)::bigint AS requests,
           coalesce(sum(enqueued_tokens), 0)::bigint AS tokens
    FROM batches
    WHERE project_id = projects.id AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
) open_batches
CROSS JOIN LATERAL (
    SELECT coalesce(sum(size_bytes), 0)::bigint AS stored_bytes FROM files WHERE project_id = projects.id
) stored
ORDER BY created_at, id

-- name: set_project
UPDATE projects
SET max_batches_in_progress = %(max_batches_in_progress)s, max_enqueued_requests = %(max_enqueued_requests)s,
    max_enqueued_tokens = %(max_enqueued_tokens)s, max_stored_bytes = %(max_stored_bytes)s,
    retention_s = %(retention_s)s
WHERE id = %(id)s

-- name: archive_project
UPDATE projects SET archived_at = now() WHERE id = %(id)s AND archived_at IS NULL RETURNING id

-- name: insert_api_key
INSERT INTO api_keys (id, project_id, name, key_sha256, hint, scopes, expires_at)
SELECT %(id)s, id, %(name)s, %(key_sha256)s, %(hint)s, %(scopes)s, %(expires_at)s
FROM projects WHERE id = %(project_id)s AND archived_at IS NULL
RETURNING id

-- name: api_keys_by_digest
SELECT api_keys.id, key_sha256, scopes, project_id, projects.name AS project_name,
       coalesce(last_used_at < now() - interval '1 minute', true) AS is_use_due
FROM api_keys JOIN projects ON projects.id = api_keys.project_id
WHERE substr(key_sha256, 1, 8) = substr(%(key_sha256)s::bytea, 1, 8)
  AND revoked_at IS NULL
  AND coalesce(least(expires_at, api_keys.created_at + %(max_lifetime)s::interval), 'infinity') > now()
  AND archived_at IS NULL

-- name: note_use_of_api_key
UPDATE api_keys SET last_used_at = now()
WHERE id = (
    SELECT id FROM api_keys
    WHERE id = %(id)s AND coalesce(last_used_at < now() - interval '1 minute', true)
    FOR NO KEY UPDATE SKIP LOCKED  -- another request of this key records it
)

-- name: digests_of_valid_keys
SELECT substr(key_sha256, 1, 8) AS digest
FROM api_keys JOIN projects ON projects.id = api_keys.project_id
WHERE revoked_at IS NULL
  AND coalesce(least(expires_at, api_keys.created_at + %(max_lifetime)s::interval), 'infinity') > now()
  AND archived_at IS NULL

-- name: valid_readers
SELECT api_keys.id
FROM api_keys JOIN projects ON projects.id = api_keys.project_id
WHERE api_keys.id = ANY (%(ids)s)
  AND 'read' = ANY (scopes)
  AND revoked_at IS NULL
  AND coalesce(least(expires_at, api_keys.created_at + %(max_lifetime)s::interval), 'infinity') > now()
  AND archived_at IS NULL

-- name: api_key_by_id
SELECT id FROM api_keys WHERE id = %(id)s

-- name: list_api_keys
SELECT api_keys.id, api_keys.name, projects.name AS project_name, scopes, hint, api_keys.created_at,
       least(expires_at, api_keys.created_at + %(max_lifetime)s::interval) AS expires_at,
       revoked_at, archived_at, last_used_at
FROM api_keys JOIN projects ON projects.id = project_id
WHERE %(project_id)s::text IS NULL OR project_id = %(project_id)s
ORDER BY api_keys.created_at, api_keys.id

-- name: revoke_api_key
UPDATE api_keys SET revoked_at = now() WHERE id = %(id)s AND revoked_at IS NULL
RETURNING id, project_id, name
