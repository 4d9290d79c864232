-- The leased rows, longest first. A lease is a UUID of version 7 that contains the time at which its delivery began; that
-- of a relay made for schema version 2 is not, and `since` is null.
with leased as (
    select d.id, d.sink, d.uid, d.type, d.key, d.owner, d.lease, d.lease_until, d.attempts
      from outbox.sink k
     cross join lateral (
        select w.id, w.sink, w.uid, w.type, w.key, w.owner, w.lease, w.lease_until, w.attempts
          from outbox.delivery w
         where w.sink = k.name and w.state = 'waiting' and w.due_at <= now() and w.lease_until > now()
        union all
        select h.id, h.sink, h.uid, h.type, h.key, h.owner, h.lease, h.lease_until, h.attempts
          from outbox.delivery h
         where h.sink = k.name and h.state = 'held' and h.lease_until > now()
     ) d
)
select d.uid::text, d.sink, d.type, d.key, coalesce(r.name, d.owner::text, 'unknown') as relay, d.attempts, t.since,
       extract(epoch from now() - t.since)::double precision as running_for,
       extract(epoch from d.lease_until - now())::double precision as leased_for
  from leased d
  left join outbox.relay r on r.id = d.owner
 cross join lateral (
    select case when get_byte(uuid_send(d.lease), 6) >> 4 = 7
                then to_timestamp(('x' || encode(substring(uuid_send(d.lease) from 1 for 6), 'hex'))::bit(48)::bigint
                                  / 1000.0) end as since
 ) t
 where t.since is null or extract(epoch from now() - t.since)::double precision >= %(longer_than)s::double precision
 order by t.since nulls first, d.sink, d.id
