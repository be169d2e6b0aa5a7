ALTER TABLE sandboxes ADD COLUMN from_snapshot TEXT;
-- What is left of the time to live while it stands still.
ALTER TABLE sandboxes ADD COLUMN ttl_left_ms BIGINT;
-- NULL: stays running however long nobody uses it.
ALTER TABLE sandboxes ADD COLUMN idle_seconds BIGINT;

CREATE TABLE snapshots (
    id TEXT PRIMARY KEY,
    account TEXT NOT NULL REFERENCES accounts (id),
    -- Its source, which may be gone.
    sandbox_id TEXT NOT NULL,
    template TEXT NOT NULL,
    name TEXT NOT NULL,
    cpu BIGINT NOT NULL,
    memory_mb BIGINT NOT NULL,
    disk_mb BIGINT NOT NULL,
    -- Goes with the last child of this fork tree.
    tree TEXT,
    created_at BIGINT NOT NULL
);

CREATE INDEX snapshots_by_account ON snapshots (account, created_at);

CREATE TABLE volumes (
    id TEXT PRIMARY KEY,
    account TEXT NOT NULL REFERENCES accounts (id),
    name TEXT NOT NULL,
    -- data | root
    kind TEXT NOT NULL,
    size_bytes BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    UNIQUE (account, name)
);

-- Who has a volume: one writer, or any number of readers.
CREATE TABLE attachments (
    volume TEXT NOT NULL REFERENCES volumes (id),
    sandbox TEXT NOT NULL,
    -- Index of the machine's slot.
    slot BIGINT NOT NULL,
    read_only BIGINT NOT NULL,
    mount_path TEXT NOT NULL,
    PRIMARY KEY (volume, sandbox),
    UNIQUE (sandbox, slot)
);

CREATE UNIQUE INDEX one_writer ON attachments (volume) WHERE read_only = 0;

CREATE TABLE events (
    sandbox TEXT NOT NULL,
    -- Orders the events of one millisecond.
    place BIGINT NOT NULL,
    at BIGINT NOT NULL,
    kind TEXT NOT NULL,
    detail TEXT,
    PRIMARY KEY (sandbox, place)
);
