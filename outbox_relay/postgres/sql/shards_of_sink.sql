-- The shards of a sink: the relay that owns each, for how long, and how many ids of the log lie behind its position.
select s.shard, coalesce(r.name, o.owner::text) as relay,
       extract(epoch from coalesce(o.lease_until, n.lease_until, s.released_at) - clock_timestamp())::double precision as lease_seconds,
       s.crashes,
       greatest(0, e.newest - case when p.b_seq is null then p.a_seq else greatest(p.a_seq, p.last_id) end) as behind
  from outbox.shard s
  left join outbox.owned o on o.sink = s.sink and o.shard = s.shard
  left join outbox.session n on n.sink = s.sink and n.owner = s.owner
  left join outbox.relay r on r.id = o.owner
  left join outbox.standing p on p.sink = s.sink and p.shard = s.shard
 cross join (select coalesce(max(l.id), 0) as newest from outbox.event l) e
 where s.sink = %(sink)s
 order by s.shard
