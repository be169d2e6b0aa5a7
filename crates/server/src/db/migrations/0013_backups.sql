-- Unbroken write-ahead log of a database, from which it is made as of a time. A new one begins where it broke off.
CREATE TABLE database_chains (
    database_id TEXT NOT NULL,
    -- When it began, in milliseconds.
    chain BIGINT NOT NULL,
    timeline BIGINT NOT NULL,
    -- The first segment that is not in the store yet.
    next_segment BIGINT NOT NULL,
    -- Everything until then is in the store. NULL: nothing is, so far.
    archived_until BIGINT,
    -- Which transactions had ended when that was so: none has since while it is the same.
    transactions TEXT,
    PRIMARY KEY (database_id, chain)
);

-- Complete base backups.
CREATE TABLE database_bases (
    database_id TEXT NOT NULL,
    chain BIGINT NOT NULL,
    -- When it was begun, in milliseconds.
    base BIGINT NOT NULL,
    ended_at BIGINT NOT NULL,
    -- What of the log it needs itself.
    first_segment BIGINT NOT NULL,
    last_segment BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    PRIMARY KEY (database_id, base)
);

-- Databases that are gone and whose backups are still to be removed from the store.
CREATE TABLE removed_backups (
    database_id TEXT PRIMARY KEY
);

-- Microseconds: it is made as its source was then.
ALTER TABLE databases ADD COLUMN target_time BIGINT;
