-- When a key was last used, to the minute: keys that nobody uses can be revoked.
ALTER TABLE api_keys ADD COLUMN last_used_at timestamptz;
