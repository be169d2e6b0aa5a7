-- As JSON; empty of a snapshot taken before it was kept.
ALTER TABLE snapshots ADD COLUMN network TEXT;
