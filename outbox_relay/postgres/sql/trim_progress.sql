-- Delete rows of the ledger that are outranked for each of their shards. The oldest rows of each sink are compared
-- with each other, so that one call is bounded, and a sink that does not advance does not hold back the others. A row
-- that is outranked by one of them is outranked.
with oldest as materialized (
    select p.sink, p.seq, p.shards, p.epochs
      from outbox.sink k
     cross join lateral (
        select o.sink, o.seq, o.shards, o.epochs from outbox.progress o
         where o.sink = k.name
         order by o.seq
         limit %(most)s::integer
     ) p
), standing as (
    select distinct on (o.sink, u.shard) o.sink, o.seq
      from oldest o cross join lateral unnest(o.shards, o.epochs) u (shard, epoch)
     order by o.sink, u.shard, u.epoch desc, o.seq desc
)
delete from outbox.progress p
 using (select o.sink, o.seq from oldest o except select n.sink, n.seq from standing n) outranked
 where p.sink = outranked.sink and p.seq = outranked.seq
