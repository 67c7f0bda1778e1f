-- Receipts of deletions, the search for orphans, and the erasure of projects.

-- Signed statements, which outlive what they name. Only ever added to.
CREATE TABLE receipts (
    id          text PRIMARY KEY,
    seq         bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    project_id  text,                      -- NULL for an orphan, whose project nobody knows
    object_id   text NOT NULL,             -- of the file, batch or project, or the key of an orphan
    envelope    jsonb NOT NULL             -- see service.receipts
);
CREATE INDEX receipts_by_project ON receipts (project_id, seq);
CREATE INDEX receipts_by_object ON receipts (object_id);

CREATE FUNCTION refuse_receipt_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'receipts can only be added';
END $$;
CREATE TRIGGER receipts_only_grow BEFORE UPDATE OR DELETE OR TRUNCATE ON receipts
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_receipt_change();

-- One row. The first search waits for a day, so that stacks that share an object store by mistake know of each other
-- before one of them deletes anything.
CREATE TABLE orphan_search (
    only_row  boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    stack_id  text NOT NULL DEFAULT replace(gen_random_uuid()::text, '-', ''),
    due_at    timestamptz NOT NULL,
    last_key  text NOT NULL DEFAULT ''     -- where an interrupted search goes on; empty before its start
);
INSERT INTO orphan_search (due_at) VALUES (now() + interval '1 day');

-- Orphans that are about to be deleted. A process that dies between the object and its receipt leaves the row.
CREATE TABLE orphans (
    key         text PRIMARY KEY,
    size_bytes  bigint,                    -- NULL if only hidden versions are left, as sha256
    sha256      bytea
);

ALTER TABLE projects ADD COLUMN erasing_at timestamptz;  -- everything in it is being deleted since then
CREATE INDEX projects_to_erase ON projects (id) WHERE erasing_at IS NOT NULL;
