-- The time at which the first event behind an id was emitted.
select outbox_internal.loadable_time(e.created_at) as at
  from outbox.event e where e.id > %(id)s::bigint order by e.id limit 1
