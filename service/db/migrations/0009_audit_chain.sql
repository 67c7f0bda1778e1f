-- The audit log records who acted and from where, each entry is sealed in a chain of digests, and refused logins are
-- counted before they become entries.

ALTER TABLE audit_log
    ALTER COLUMN project_id DROP NOT NULL,  -- NULL: a login with an unknown key
    ADD COLUMN operator        text,        -- of the command line: user@host, or the name that was given
    ADD COLUMN client_address  text,        -- of the client of the API
    ADD COLUMN request_id      text;        -- of the request to the API, as in its log

-- One row for each sealed entry, in the order of sealing. sha256 is the digest of the previous seal's digest and the
-- entry (service.audit.chain), so it vouches for all entries before it.
CREATE TABLE audit_seals (
    position  bigint PRIMARY KEY CHECK (position > 0),  -- without gaps, from 1 on
    seq       bigint NOT NULL UNIQUE,                   -- of the entry in audit_log
    sha256    bytea NOT NULL
);
CREATE TRIGGER audit_seals_only_grow BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_seals
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change();

-- Logins that the API refused, counted for each minute. The reconciler moves past minutes to the audit log.
CREATE TABLE refused_logins (
    minute      timestamptz NOT NULL,
    address     text NOT NULL,              -- an IPv4 address or the /64 network of an IPv6 address
    error_code  text NOT NULL,
    key_id      text NOT NULL,              -- '' for an unknown key
    project_id  text,
    count       bigint NOT NULL,
    PRIMARY KEY (minute, address, error_code, key_id)
);

-- The position in the chain up to which each syslog server has the log.
CREATE TABLE audit_exports (
    target    text PRIMARY KEY,  -- host:port
    position  bigint NOT NULL DEFAULT 0
);
