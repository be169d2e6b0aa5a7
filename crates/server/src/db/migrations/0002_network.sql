-- A JSON object; a field that is missing has its default.
ALTER TABLE sandboxes ADD COLUMN network TEXT NOT NULL DEFAULT '{}';

-- Bytes over the networks that the sandbox no longer has; the present one counts its own.
ALTER TABLE sandboxes ADD COLUMN sent_bytes BIGINT NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN received_bytes BIGINT NOT NULL DEFAULT 0;
