-- The positions of these shards of a replay, and the ids between which it lies.
select u.shard, max(u.last_id) as last_id, r.from_id, r.upto_id
  from outbox.replay r
  join outbox.replay_progress p on p.replay = r.id
 cross join lateral unnest(p.shards, p.last_ids) u (shard, last_id)
 where r.id = %(replay)s::bigint and u.shard = any (%(shards)s::smallint[])
   and outbox_internal.only_at(%(server)s::text)
 group by u.shard, r.from_id, r.upto_id
