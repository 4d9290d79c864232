-- Rows of the ledger that are outranked for every shard in them.
delete from outbox.progress p
 where not exists (select from outbox.standing n where n.sink = p.sink and n.seq = p.seq)
