-- The rows of an event, one for each sink that has one, without payload and headers.
select d.sink, d.id, d.shard, d.uid::text, d.type, d.key, d.content_type, outbox_internal.loadable_time(d.created_at) as created_at,
       outbox_internal.loadable_time(d.deliver_at) as deliver_at, d.state as state,
       d.attempts, d.last_error as error, d.last_status as status, outbox_internal.last_attempt_of(d.sink, d.id) as last_attempt,
       extract(epoch from now() - outbox_internal.loadable_time(d.last_attempt_at))::double precision as tried_seconds,
       outbox_internal.loadable_time(case when d.state = 'dead' then greatest(d.last_attempt_at, d.since) else d.since end) as since,
       case when d.state <> 'dead' then outbox_internal.loadable_time(d.due_at) end as due_at,
       case when d.lease_until > now() then coalesce(r.name, d.owner::text) end as relay
  from outbox.delivery d
  left join outbox.relay r on r.id = d.owner
 where d.uid = %(uid)s::uuid and (%(sink)s::text is null or d.sink = %(sink)s::text)
 order by d.sink, d.id
