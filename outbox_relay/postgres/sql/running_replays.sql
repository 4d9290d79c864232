-- The replays that are not cleared, the oldest first. One that has not adopted a rebase does not run. `walking` is false when
-- only rows are left.
select r.id, r.target, r.state = 'running' and r.floor = m.floor as running, r.ids is not null as named, r.rate,
       (select count(distinct u.shard)
          from outbox.replay_progress p cross join lateral unnest(p.shards, p.last_ids) u (shard, last_id)
         where p.replay = r.id and u.last_id >= r.upto_id) < 64 as walking
  from outbox.replay r cross join outbox.meta m
 where not r.cleared
 order by r.id
