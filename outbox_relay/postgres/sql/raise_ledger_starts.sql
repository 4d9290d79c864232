-- Let readers of the ledger of a sink begin behind what was trimmed. Return true if it should be called again soon.
select outbox_internal.raise_ledger_starts() as again
