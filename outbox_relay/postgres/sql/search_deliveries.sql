-- Deliveries that a filter means, newest event first, of those before (before_id, before_sink), as
-- outbox_internal.find_deliveries looks for them: always at least one row.
select now() as at, f.floor, f.floor_sink, f.matched, d.id, d.uid, d.sink::text as sink, d.type::text as type,
       d.key::text as key, d.state, d.attempts,
       d.last_error as error, d.last_status as status,
       outbox_internal.loadable_time(case when d.state = 'dead' then greatest(d.last_attempt_at, d.since) else d.since end) as since,
       case when d.state <> 'dead' then outbox_internal.loadable_time(d.due_at) end as due_at,
       outbox_internal.loadable_time(d.last_attempt_at) as last_attempt_at
  from outbox_internal.find_deliveries(%(filter)s::jsonb, %(before_id)s::bigint, %(before_sink)s::text, %(looks)s::integer,
                                       %(most)s::integer, true) f
  left join outbox.delivery d on d.id = f.id and d.sink = f.sink
 order by d.id desc, d.sink desc
