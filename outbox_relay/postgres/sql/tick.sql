-- One look at the log. A transaction of its own, never together with anything that writes.
select seq, snapshot::text, next_xid, incarnation, wal, now, generations from outbox.tick()
