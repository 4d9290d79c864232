-- The shards without a position or without a row, by sink. Sinks without such a shard are left out.
select k.name as sink, array_agg(n.shard order by n.shard) as shards
  from outbox.sink k
 cross join generate_series(0, 63) n (shard)
  left join outbox.standing p on p.sink = k.name and p.shard = n.shard
  left join outbox.shard s on s.sink = k.name and s.shard = n.shard
 where p.sink is null or s.sink is null
 group by k.name
 order by k.name
