-- Gives up shards at the epochs at which this relay owns them. `lease_until` becomes the time of the release.
update outbox.shard s
   set owner = null, lease_until = clock_timestamp()
  from unnest(%(shards)s::smallint[], %(epochs)s::bigint[]) k (shard, epoch)
 where s.sink = %(sink)s and s.shard = k.shard and s.epoch = k.epoch and s.owner = %(owner)s::uuid
returning s.shard
