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

-- What is paid for: who had what from when to when, as steady times. Kept when the thing is gone, and its account.
CREATE TABLE uses (
    account TEXT NOT NULL,
    -- machine | volume | snapshot
    kind TEXT NOT NULL,
    -- Its id.
    thing TEXT NOT NULL,
    vcpus BIGINT NOT NULL,
    memory_mb BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    began BIGINT NOT NULL,
    -- NULL: it is still there.
    ended BIGINT
);

CREATE UNIQUE INDEX open_uses ON uses (thing) WHERE ended IS NULL;
CREATE INDEX uses_by_account ON uses (account, began);

-- Bytes that sandboxes have sent, by the minute (a steady time) in which they were counted.
CREATE TABLE egress (
    account TEXT NOT NULL,
    minute BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    PRIMARY KEY (account, minute)
);

-- What of the bytes it has sent is in there.
ALTER TABLE sandboxes ADD COLUMN metered_bytes BIGINT NOT NULL DEFAULT 0;
