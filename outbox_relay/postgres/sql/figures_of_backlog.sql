-- The events of the log that a sink has not settled, and the age of the oldest one.
select b.events,
       coalesce(greatest(extract(epoch from clock_timestamp() - outbox_internal.loadable_time(b.oldest)), 0), 0)::double precision as oldest
  from outbox_internal.backlog(%(sink)s::text, %(types)s::text[], %(most)s::integer, %(seconds)s::double precision) b
