CREATE TABLE execs (
    sandbox TEXT NOT NULL,
    -- Chosen by the client, or made by the server.
    id TEXT NOT NULL,
    -- Orders the execs of one sandbox; rises.
    place BIGINT NOT NULL,
    -- running | succeeded | failed | cancelled | expired | lost
    state TEXT NOT NULL,
    exit_code BIGINT,
    killed_for_memory BIGINT NOT NULL,
    -- True counts, also of what is not kept.
    stdout_bytes BIGINT NOT NULL,
    stderr_bytes BIGINT NOT NULL,
    truncated BIGINT NOT NULL,
    started_at BIGINT NOT NULL,
    finished_at BIGINT,
    -- A steady time, from which its age counts.
    ended_steady BIGINT,
    -- Where its output is: none | row | files, or aged when it is gone.
    output TEXT NOT NULL,
    kept_bytes BIGINT NOT NULL,
    -- In base64, where it is short.
    stdout TEXT NOT NULL,
    stderr TEXT NOT NULL,
    PRIMARY KEY (sandbox, id)
);

CREATE INDEX execs_by_place ON execs (sandbox, place);
CREATE INDEX execs_by_age ON execs (ended_steady);
