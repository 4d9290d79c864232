-- Renew leases of this relay at the epochs that it knows, even if they ended long ago. A lease that is not returned is lost.
update outbox.shard s
   set lease_until = greatest(s.lease_until, clock_timestamp() + %(lease)s::double precision * interval '1 second')
  from (
    select c.sink, c.shard
      from unnest(%(sinks)s::text[], %(shards)s::smallint[], %(epochs)s::bigint[]) k (sink, shard, epoch)
      join outbox.shard c on c.sink = k.sink and c.shard = k.shard and c.epoch = k.epoch and c.owner = %(owner)s::uuid
     order by c.sink, c.shard
       for no key update of c
  ) mine
 where s.sink = mine.sink and s.shard = mine.shard
returning s.sink, s.shard, s.epoch, %(lease)s::double precision as lease_seconds
