-- The position of these shards has moved: whatever stopped their earlier owners did not stop this one.
update outbox.shard s
   set crashes = 0
  from unnest(%(shards)s::smallint[], %(epochs)s::bigint[]) k (shard, epoch)
 where s.sink = %(sink)s and s.shard = k.shard and s.epoch = k.epoch and s.owner = %(owner)s::uuid and s.crashes > 0
