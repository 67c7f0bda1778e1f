-- Webhook endpoints, and the deliveries that a database trigger adds when a batch ends.

-- name: insert_webhook_endpoint
WITH created AS (
    INSERT INTO webhook_endpoints (id, project_id, name, url, secret, events)
    VALUES (%(id)s, %(project_id)s, %(name)s, %(url)s, %(secret)s, %(events)s)
    RETURNING *
), noted AS (
    INSERT INTO audit_log (project_id, actor, operator, client_address, request_id, type, object_id, data)
    SELECT project_id, %(actor)s, %(operator)s, %(client_address)s, %(request_id)s, 'webhook_endpoint.created', id,
           jsonb_build_object('events', events)
    FROM created
)
SELECT id, name, url, events, created_at FROM created

-- name: webhook_endpoint_by_id
SELECT id, name, url, events, created_at FROM webhook_endpoints WHERE id = %(id)s AND project_id = %(project_id)s

-- name: list_webhook_endpoints
-- An unknown cursor returns no rows; the caller checks the cursor first.
SELECT id, name, url, events, created_at FROM webhook_endpoints
WHERE project_id = %(project_id)s
  AND (%(after)s::text IS NULL
       OR (created_at, id) < (SELECT created_at, id FROM webhook_endpoints
                              WHERE id = %(after)s AND project_id = %(project_id)s))
ORDER BY created_at DESC, id DESC
LIMIT %(limit)s

-- name: delete_webhook_endpoint
-- Deletes its pending deliveries too, by foreign key.
WITH deleted AS (
    DELETE FROM webhook_endpoints
    WHERE id = %(id)s AND (%(project_id)s::text IS NULL OR project_id = %(project_id)s)
    RETURNING id, project_id
), noted AS (
    INSERT INTO audit_log (project_id, actor, operator, client_address, request_id, type, object_id)
    SELECT project_id, %(actor)s, %(operator)s, %(client_address)s, %(request_id)s, 'webhook_endpoint.deleted', id
    FROM deleted
)
SELECT id FROM deleted

-- name: lock_webhook_secrets
SELECT id, secret FROM webhook_endpoints ORDER BY id FOR NO KEY UPDATE

-- name: set_webhook_secret
UPDATE webhook_endpoints SET secret = %(secret)s WHERE id = %(id)s

-- name: claim_deliveries
-- One delivery of each endpoint that has none in progress, so that a slow endpoint delays no other. A claimed delivery
-- is due again when its lease ends, in case the process that claimed it dies before it records the outcome.
UPDATE webhook_deliveries AS claimed
SET due_at = now() + make_interval(secs => %(lease_s)s), attempts = attempts + 1
FROM webhook_endpoints
WHERE webhook_endpoints.id = claimed.endpoint_id
  AND claimed.due_at <= now()
  AND (claimed.event_id, claimed.endpoint_id) IN (
    SELECT event_id, endpoint_id
    FROM (
        SELECT DISTINCT ON (endpoint_id) event_id, endpoint_id, due_at FROM webhook_deliveries
        WHERE due_at <= now() AND endpoint_id <> ALL (%(busy)s)
        ORDER BY endpoint_id, due_at
    ) AS first_of_each
    ORDER BY due_at
    LIMIT %(limit)s)
RETURNING event_id, endpoint_id, batch_id, type, claimed.created_at, attempts, url, secret

-- name: delivery_succeeded
UPDATE webhook_deliveries SET delivered_at = now(), due_at = NULL, last_error = NULL
WHERE event_id = %(event_id)s AND endpoint_id = %(endpoint_id)s

-- name: delivery_failed
UPDATE webhook_deliveries SET due_at = %(due_at)s, last_error = %(error)s
WHERE event_id = %(event_id)s AND endpoint_id = %(endpoint_id)s AND delivered_at IS NULL
