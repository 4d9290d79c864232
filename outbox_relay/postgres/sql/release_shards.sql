-- Release shards at the epochs at which this relay owns them.
update outbox.shard s
   set owner = null, released_at = clock_timestamp()
  from (
    select c.shard
      from unnest(%(shards)s::smallint[], %(epochs)s::bigint[]) k (shard, epoch)
      join outbox.shard c
        on c.sink = %(sink)s and c.shard = k.shard and c.epoch = k.epoch and c.owner = %(owner)s::uuid
     order by c.shard
       for no key update of c
  ) mine
 where s.sink = %(sink)s and s.shard = mine.shard
returning s.shard
