-- The positions of these shards.
select p.shard, p.a_seq, p.a_snapshot::text, p.a_next, p.b_seq, p.b_snapshot::text, p.b_next, p.last_id
  from outbox.standing p
 where p.sink = %(sink)s and p.shard = any (%(shards)s::smallint[])
   and outbox.only_at(%(server)s::text)
