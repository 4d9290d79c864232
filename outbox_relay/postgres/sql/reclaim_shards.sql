-- Raise the epochs of the shards of this relay. This statement waits for a settlement at an old epoch that has passed
-- its fence. A settlement that has not passed it fails there. A relay that serves an older generation checks that before it
-- reads again, and then reads nothing: the generation in force is right for its shards too.
update outbox.shard s
   set epoch = s.epoch + 1,
       generation = coalesce((select k.generation from outbox.sink k where k.name = s.sink), s.generation)
  from (
    select c.shard from outbox.shard c where c.sink = %(sink)s and c.owner = %(owner)s::uuid order by c.shard for update
  ) mine
 where s.sink = %(sink)s and s.shard = mine.shard
returning s.shard, s.epoch, s.crashes
