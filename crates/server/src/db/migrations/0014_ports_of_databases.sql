-- A database that could not be made gives its port back: 0 is none.
DROP INDEX databases_by_port;
UPDATE databases SET port = 0 WHERE state = 'failed';
CREATE UNIQUE INDEX databases_by_port ON databases (port) WHERE port > 0;
