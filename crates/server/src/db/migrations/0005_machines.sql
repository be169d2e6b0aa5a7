-- For people; NULL for a sandbox without one.
ALTER TABLE sandboxes ADD COLUMN name TEXT;
-- Its root disk is a volume, which is among its attachments unless it was detached.
ALTER TABLE sandboxes ADD COLUMN durable BIGINT NOT NULL DEFAULT 0;
-- Its root volume stays when it goes.
ALTER TABLE sandboxes ADD COLUMN keeps_root BIGINT NOT NULL DEFAULT 0;
-- Its guest was booted, and not restored.
ALTER TABLE sandboxes ADD COLUMN cold_boot BIGINT NOT NULL DEFAULT 0;

-- Of a root disk: what it was made from.
ALTER TABLE volumes ADD COLUMN template TEXT;

-- What is off has nothing to become by itself.
UPDATE sandboxes SET target = 'stopped' WHERE state IN ('stopped', 'failed') AND target <> 'deleted';
