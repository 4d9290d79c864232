-- The shards of a sink: the relay that owns each, for how long, and how many ids of the log lie behind its position.
select s.shard, case when s.lease_until > clock_timestamp() then coalesce(r.name, s.owner::text) end as relay,
       extract(epoch from s.lease_until - clock_timestamp())::double precision as lease_seconds, s.crashes,
       greatest(0, e.newest - case when p.b_seq is null then p.a_seq else greatest(p.a_seq, p.last_id) end) as behind
  from outbox.shard s
  left join outbox.relay r on r.id = s.owner
  left join outbox.standing p on p.sink = s.sink and p.shard = s.shard
 cross join (select coalesce(max(l.id), 0) as newest from outbox.event l) e
 where s.sink = %(sink)s
 order by s.shard
