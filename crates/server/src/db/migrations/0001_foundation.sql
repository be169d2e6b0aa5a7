-- One text for SQLite and PostgreSQL: ids and JSON are TEXT, times BIGINT milliseconds since 1970, flags BIGINT 0 or 1.
-- Every row has its account.

CREATE TABLE accounts (
    id TEXT PRIMARY KEY,
    created_at BIGINT NOT NULL
);

INSERT INTO accounts (id, created_at) VALUES ('default', 0);

CREATE TABLE keys (
    id TEXT PRIMARY KEY,
    account TEXT NOT NULL REFERENCES accounts (id),
    label TEXT NOT NULL,
    -- The first characters, for people.
    prefix TEXT NOT NULL,
    -- SHA-256 of the key, in hexadecimal.
    hash TEXT NOT NULL UNIQUE,
    scope TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    expires_at BIGINT
);

CREATE TABLE sandboxes (
    id TEXT PRIMARY KEY,
    account TEXT NOT NULL REFERENCES accounts (id),
    template TEXT NOT NULL,
    -- What its machine was restored from.
    bake TEXT NOT NULL,
    cpu BIGINT NOT NULL,
    memory_mb BIGINT NOT NULL,
    disk_mb BIGINT NOT NULL,
    state TEXT NOT NULL,
    target TEXT NOT NULL,
    -- JSON objects of strings.
    metadata TEXT NOT NULL,
    environment TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    -- NULL: persistent.
    ttl_seconds BIGINT,
    expires_at BIGINT,
    -- Index of its namespace, uid and directory on the host.
    slot BIGINT,
    boot_ms BIGINT NOT NULL,
    error TEXT
);

CREATE INDEX sandboxes_by_account ON sandboxes (account, created_at);

CREATE TABLE templates (
    account TEXT NOT NULL REFERENCES accounts (id),
    name TEXT NOT NULL,
    digest TEXT NOT NULL,
    label TEXT NOT NULL,
    description TEXT NOT NULL,
    cpu BIGINT NOT NULL,
    memory_mb BIGINT NOT NULL,
    disk_mb BIGINT NOT NULL,
    size_bytes BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    PRIMARY KEY (account, name)
);

CREATE TABLE builds (
    id TEXT PRIMARY KEY,
    account TEXT NOT NULL REFERENCES accounts (id),
    name TEXT NOT NULL,
    status TEXT NOT NULL,
    error TEXT,
    created_at BIGINT NOT NULL,
    ended_at BIGINT
);

CREATE INDEX builds_by_account ON builds (account, created_at);
