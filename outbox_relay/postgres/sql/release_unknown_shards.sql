-- Release shards whose claim was not answered. This relay owns them only in the database, so it has read none of their
-- events.
update outbox.shard s
   set owner = null, lease_until = clock_timestamp()
  from (
    select c.shard from outbox.shard c
     where c.sink = %(sink)s and c.owner = %(owner)s::uuid and c.shard <> all (%(known)s::smallint[])
     order by c.shard
       for no key update
  ) unknown
 where s.sink = %(sink)s and s.shard = unknown.shard
