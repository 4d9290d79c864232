-- A tick for an action, in a transaction of its own.
select seq, snapshot::text, next_xid, incarnation, generations from outbox_internal.action_tick()
