-- The deliveries of a key that take part in its order, of each sink the oldest first.
select d.id, d.uid, d.sink::text as sink, d.type::text as type, d.key::text as key,
       d.state as state, d.attempts, d.last_error as error,
       d.last_status as status,
       outbox_internal.loadable_time(case when d.state = 'dead' then greatest(d.last_attempt_at, d.since) else d.since end) as since,
       case when d.state <> 'dead' then outbox_internal.loadable_time(d.due_at) end as due_at,
       outbox_internal.loadable_time(d.last_attempt_at) as last_attempt_at
  from outbox.sink k
 cross join lateral (
    select * from (
        select w.id, w.sink from outbox.delivery w
         where w.sink = k.name and w.key = %(key)s::text and w.ordered and w.state <> 'dead'
         order by w.id limit %(most)s::integer + 1
    ) w
    union all
    select * from (
        select w.id, w.sink from outbox.delivery w
         where w.sink = k.name and w.key = %(key)s::text and w.ordered and w.state = 'dead'
         order by w.id limit %(most)s::integer + 1
    ) w
 ) l
  join outbox.delivery d on d.id = l.id and d.sink = l.sink
 where k.name < '~' collate "C"
 order by d.sink, d.id
 limit %(most)s::integer + 1
