-- PostgreSQL for a user, in a sandbox of the same id.
CREATE TABLE databases (
    id TEXT PRIMARY KEY,
    account TEXT NOT NULL REFERENCES accounts (id),
    label TEXT NOT NULL,
    -- 1g | 4g | 16g
    size TEXT NOT NULL,
    cpu BIGINT NOT NULL,
    always_on BIGINT NOT NULL,
    idle_seconds BIGINT NOT NULL,
    -- At the server's address; no two have the same.
    port BIGINT NOT NULL,
    -- provisioning | ready | failed | deleting
    state TEXT NOT NULL,
    error TEXT,
    -- JSON: role, password, database, and the password of the server's own role.
    credentials TEXT NOT NULL,
    -- JSON: the same of what it is made from, which end once it has its own.
    origin TEXT NOT NULL,
    cloned_from TEXT,
    created_at BIGINT NOT NULL
);

CREATE UNIQUE INDEX databases_by_port ON databases (port);
CREATE INDEX databases_by_account ON databases (account, created_at);

-- It is a database's: neither listed nor deleted by itself.
ALTER TABLE sandboxes ADD COLUMN managed BIGINT NOT NULL DEFAULT 0;
-- JSON: ids of the databases whose URLs its commands are given.
ALTER TABLE sandboxes ADD COLUMN databases TEXT NOT NULL DEFAULT '[]';
