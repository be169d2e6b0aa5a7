-- In milliseconds; NULL: it is queued, or of a server that did not keep it.
ALTER TABLE builds ADD COLUMN started_at BIGINT;
-- MiB: the disk of the template's sandboxes.
ALTER TABLE builds ADD COLUMN disk_mb BIGINT;
