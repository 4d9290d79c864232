-- The relays that were seen recently or own a shard, and the number of their shards of each sink. `stale`: the heartbeat is
-- old, and of a relay with a session the rest of it is shorter than the heartbeat's age, so more than half of it has passed.
-- That of a relay that serves no sink may be older.
select r.id, r.name, r.version, extract(epoch from now() - r.seen_at)::double precision as seen_seconds_ago,
       r.seen_at < now() - %(stale)s::double precision * interval '1 second'
           and coalesce((select max(n.lease_until) - now() < now() - r.seen_at from outbox.session n
                          where n.owner = r.id and n.lease_until > now()),
                        r.seen_at < now() - %(stale)s::double precision * interval '2.5 seconds') as stale,
       k.sink, count(s.shard)::integer as shards
  from outbox.relay r
  left join lateral (
    select u.sink from unnest(r.sinks) u (sink) where u.sink < '~' collate "C"
    union
    select o.sink from outbox.owned o where o.owner = r.id and o.sink < '~'
  ) k on true
  left join outbox.owned s on s.sink = k.sink and s.owner = r.id
 where r.seen_at > now() - %(seconds)s::double precision * interval '1 second'
    or exists (select from outbox.owned o where o.owner = r.id)
 group by r.id, r.name, r.version, r.seen_at, k.sink
 order by r.name, r.id, k.sink
