-- A POST that came with an `Idempotency-Key`, and how it was answered.
CREATE TABLE keyed_requests (
    -- The ids of what it makes are drawn from this one.
    id TEXT PRIMARY KEY,
    account TEXT NOT NULL REFERENCES accounts (id),
    key TEXT NOT NULL,
    -- SHA-256 of route and body, in hexadecimal.
    fingerprint TEXT NOT NULL,
    -- A steady time.
    begun_at BIGINT NOT NULL,
    -- JSON; NULL until it is answered.
    answer TEXT,
    UNIQUE (account, key)
);

CREATE INDEX keyed_requests_by_time ON keyed_requests (begun_at);

-- NULL: the default of the settings.
ALTER TABLE accounts ADD COLUMN plan TEXT;
