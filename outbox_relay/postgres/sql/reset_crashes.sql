-- Reset the crash count of shards whose position has advanced: the error that stopped earlier owners did not stop this
-- one.
update outbox.shard s
   set crashes = 0
  from (
    select c.shard
      from unnest(%(shards)s::smallint[], %(epochs)s::bigint[]) k (shard, epoch)
      join outbox.shard c
        on c.sink = %(sink)s and c.shard = k.shard and c.epoch = k.epoch and c.owner = %(owner)s::uuid and c.crashes > 0
     order by c.shard
       for no key update of c
  ) mine
 where s.sink = %(sink)s and s.shard = mine.shard
