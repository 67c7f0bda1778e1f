-- A batch is given up in two steps: the reason is written down, and once its job has stopped the batch fails with it.
ALTER TABLE batches
    ADD COLUMN giving_up_at       timestamptz,
    ADD COLUMN giving_up_code     text,
    ADD COLUMN giving_up_message  text,
    ADD COLUMN launch_refused_at  timestamptz,  -- the first time for the newest job; NULL while it was not
    ADD CHECK (num_nulls(giving_up_at, giving_up_code, giving_up_message) IN (0, 3));
