-- What the server signs with; made once.
CREATE TABLE secrets (
    name TEXT PRIMARY KEY,
    -- In base64.
    value TEXT NOT NULL
);

-- Those that are neither revoked nor long expired. The tokens themselves are kept nowhere.
CREATE TABLE preview_tokens (
    id TEXT PRIMARY KEY,
    sandbox TEXT NOT NULL,
    port BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL
);

CREATE INDEX preview_tokens_by_sandbox ON preview_tokens (sandbox);

CREATE TABLE exposed_ports (
    sandbox TEXT NOT NULL,
    port BIGINT NOT NULL,
    PRIMARY KEY (sandbox, port)
);
