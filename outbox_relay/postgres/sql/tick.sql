-- One observation of the log, in a transaction of its own: never together with a statement that writes.
select seq, snapshot::text as snapshot, next_xid, incarnation, now, generations from outbox_internal.tick(%(known)s::text)
