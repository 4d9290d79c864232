-- Rows of the ledger that a newer one outranks.
with newest as (
    select s.sink, s.shard, p.epoch, p.seq
      from outbox.shard s
     cross join lateral (
        select epoch, seq from outbox.progress p
         where p.sink = s.sink and p.shard = s.shard
         order by p.epoch desc, p.seq desc
         limit 1
     ) p
)
delete from outbox.progress p
 using newest n
 where p.sink = n.sink and p.shard = n.shard and (p.epoch, p.seq) < (n.epoch, n.seq)
