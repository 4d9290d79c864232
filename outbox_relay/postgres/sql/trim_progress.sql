-- Rows of the ledger that are outranked for every shard in them. The oldest rows are compared with each other, so that one
-- call is bounded however many there are; what is outranked by one of them is outranked.
with oldest as materialized (
    select p.sink, p.seq, p.shards, p.epochs from outbox.progress p order by p.seq limit 5000
), standing as (
    select distinct on (o.sink, u.shard) o.sink, o.seq
      from oldest o cross join lateral unnest(o.shards, o.epochs) u (shard, epoch)
     order by o.sink, u.shard, u.epoch desc, o.seq desc
)
delete from outbox.progress p
 using (select o.sink, o.seq from oldest o except select n.sink, n.seq from standing n) outranked
 where p.sink = outranked.sink and p.seq = outranked.seq
