-- End the session of a relay that serves the sink no more, and release its shards, also those of claims without an answer.
with ended as (
    delete from outbox.session n where n.sink = %(sink)s and n.owner = %(owner)s::uuid
)
update outbox.shard s
   set owner = null, released_at = clock_timestamp()
  from (
    select c.shard from outbox.shard c
     where c.sink = %(sink)s and c.owner = %(owner)s::uuid
     order by c.shard
       for no key update
  ) mine
 where s.sink = %(sink)s and s.shard = mine.shard
