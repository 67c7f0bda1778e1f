-- Images that lines name by the id of an uploaded file: the job reads them with the segment.
ALTER TABLE segments
    ADD COLUMN files        text[] NOT NULL DEFAULT '{}',  -- ids of the files that its rows name
    ADD COLUMN media_bytes  bigint NOT NULL DEFAULT 0;     -- by so many bytes their content enlarges its rows
-- Whether a file is in use. Segments without files are not in it.
CREATE INDEX segments_by_file ON segments USING gin (files) WHERE files <> '{}';
