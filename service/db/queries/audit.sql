-- The audit log, the chain of its seals, and refused logins before they become entries.

-- name: insert_audit
INSERT INTO audit_log (project_id, actor, operator, client_address, request_id, type, object_id, data)
VALUES (%(project_id)s, %(actor)s, %(operator)s, %(client_address)s, %(request_id)s, %(type)s, %(object_id)s, %(data)s)

-- name: count_refused_login
INSERT INTO refused_logins (minute, address, error_code, key_id, project_id, count)
SELECT date_trunc('minute', now()), %(address)s,
       CASE WHEN %(missing_scope)s THEN 'missing_scope'
            WHEN found.id IS NULL THEN 'unknown_key'
            WHEN revoked_at IS NOT NULL THEN 'revoked_key'
            WHEN archived_at IS NOT NULL THEN 'archived_project'
            ELSE 'expired_key' END,
       coalesce(found.id, ''), found.project_id, 1
FROM (SELECT) AS one
LEFT JOIN (
    SELECT api_keys.id, project_id, revoked_at, archived_at
    FROM api_keys JOIN projects ON projects.id = project_id
    WHERE substr(key_sha256, 1, 8) = substr(%(key_sha256)s::bytea, 1, 8) AND key_sha256 = %(key_sha256)s
) AS found ON true
ON CONFLICT (minute, address, error_code, key_id) DO UPDATE SET count = refused_logins.count + 1

-- name: record_refused_logins
-- A minute that ended half a minute ago is complete. Of one with very many addresses, those with the most refusals are
-- listed and the others are summed, so that nobody can fill the audit log.
WITH past AS (
    DELETE FROM refused_logins WHERE minute < now() - interval '90 seconds' RETURNING *
), ranked AS (
    SELECT *, row_number() OVER (PARTITION BY minute ORDER BY count DESC, address) > %(max_entries)s AS is_summed
    FROM past
)
INSERT INTO audit_log (at, project_id, actor, client_address, type, object_id, data)
SELECT minute, project_id, coalesce(nullif(key_id, ''), 'unknown'), address, 'login.failed',
       coalesce(nullif(key_id, ''), 'unknown'), jsonb_build_object('error_code', error_code, 'count', count)
FROM ranked WHERE NOT is_summed
UNION ALL
SELECT minute, NULL, 'unknown', NULL, 'login.failed', 'unknown',
       jsonb_build_object('error_code', 'other_addresses', 'count', sum(count))
FROM ranked WHERE is_summed
GROUP BY minute
ORDER BY minute

-- name: audit_head
SELECT position, seq, sha256 FROM audit_seals ORDER BY position DESC LIMIT 1

-- name: is_seal
SELECT EXISTS (SELECT FROM audit_seals WHERE seq = %(seq)s AND sha256 = %(sha256)s)

-- name: unsealed_audit_log
-- Entries after the one that was sealed so many positions ago, in their order; all entries without that position.
SELECT audit_log.* FROM audit_log
WHERE seq > coalesce((SELECT s.seq FROM audit_seals s
                      WHERE s.position = (SELECT max(position) FROM audit_seals) - %(distance)s::bigint),
                     '-9223372036854775808'::bigint)
  AND NOT EXISTS (SELECT FROM audit_seals WHERE audit_seals.seq = audit_log.seq)
ORDER BY seq
LIMIT %(limit)s

-- name: insert_seals
INSERT INTO audit_seals (position, seq, sha256)
SELECT * FROM unnest(%(positions)s::bigint[], %(seqs)s::bigint[], %(digests)s::bytea[])

-- name: sealed_audit_log
SELECT s.position, s.seq AS sealed_seq, s.sha256 AS seal, audit_log.*
FROM audit_seals s LEFT JOIN audit_log ON audit_log.seq = s.seq
WHERE s.position > %(after)s
ORDER BY s.position
LIMIT %(limit)s

-- name: position_of_entry
SELECT position FROM audit_seals WHERE seq = %(seq)s

-- name: add_audit_export
INSERT INTO audit_exports (target) VALUES (%(target)s) ON CONFLICT DO NOTHING

-- name: lock_audit_export
-- Of two exports to the same target at a time, one waits.
SELECT position FROM audit_exports WHERE target = %(target)s FOR UPDATE

-- name: advance_audit_export
UPDATE audit_exports SET position = %(position)s WHERE target = %(target)s

-- name: count_unsealed
SELECT count(*) AS entries FROM audit_log WHERE NOT EXISTS (SELECT FROM audit_seals s WHERE s.seq = audit_log.seq)

-- name: audit_log
SELECT audit_log.*, projects.name AS project_name
FROM audit_log LEFT JOIN projects ON projects.id = project_id
WHERE (%(project_id)s::text IS NULL OR project_id = %(project_id)s)
  AND (%(since)s::timestamptz IS NULL OR at >= %(since)s)
ORDER BY audit_log.seq
