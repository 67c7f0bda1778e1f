-- name: list_api_keys
SELECT id, name, hint, created_at, expires_at, revoked_at FROM api_keys ORDER BY created_at, id

-- name: revoke_api_key
UPDATE api_keys SET revoked_at = coalesce(revoked_at, now()) WHERE id = %(id)s RETURNING id
