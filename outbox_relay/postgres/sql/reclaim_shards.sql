-- New epochs for the shards this relay owns: a settlement of the last epoch that is still under way is waited
-- for if it has passed its fence, and fails at it if it has not.
update outbox.shard s
   set epoch = s.epoch + 1, lease_until = clock_timestamp() + %(lease)s::double precision * interval '1 second'
  from (
    select c.shard from outbox.shard c where c.sink = %(sink)s and c.owner = %(owner)s::uuid order by c.shard for update
  ) mine
 where s.sink = %(sink)s and s.shard = mine.shard
returning s.shard, s.epoch, s.crashes
