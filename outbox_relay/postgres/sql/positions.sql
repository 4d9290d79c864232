-- The positions of these shards.
select p.shard, p.a_seq, p.a_snapshot, p.a_next, p.b_seq, p.b_snapshot, p.b_next, p.last_id
  from outbox_internal.positions(%(sink)s::text, %(shards)s::smallint[]) p
 where outbox_internal.only_at(%(server)s::text)
