-- Let readers of the ledger begin behind what was trimmed, and return the number of sinks for which they do.
select outbox.raise_ledger_starts() as raised
