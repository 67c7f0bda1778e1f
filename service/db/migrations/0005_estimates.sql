-- Estimates of batches, and the measurements of earlier ones that they are made from.

ALTER TABLE batches ADD COLUMN estimate jsonb;  -- made when the input file is accepted; NULL before

-- The newest rows of each model; they outlive their batches. model_key is a digest of the model's settings.
CREATE TABLE measurements (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    model_key      text NOT NULL,
    measured_at    timestamptz NOT NULL,
    rows           bigint NOT NULL,            -- those that engines answered, if most are equal
    input_tokens   bigint NOT NULL,
    output_tokens  bigint NOT NULL,
    engines        integer NOT NULL,
    engine_s       double precision NOT NULL,  -- the sum over its engines
    busy_s         double precision NOT NULL,  -- from the first ready engine to the last answer
    other_s        double precision NOT NULL,  -- the rest of the time from creation to completion, without the queue
    job_other_s    double precision NOT NULL,  -- the rest of the time that its job held GPUs
    output_share   double precision            -- of the tokens that the requests allowed; NULL if those are unknown
);
CREATE INDEX measurements_by_model ON measurements (model_key, id);
