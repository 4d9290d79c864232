-- Record why a relay did not find the next time of a schedule, or did not fire it, unless that was done or the schedule was
-- changed meanwhile. The same reason is written at most once a minute.
update outbox.schedule s
   set error = left(%(reason)s::text, 500), error_at = clock_timestamp(), retry_at = null
  from (
    select c.name from outbox.schedule c
     where c.name = %(name)s and c.generation = %(generation)s::bigint and c.after_at = %(after)s::timestamptz
       and c.next_at is not distinct from %(next)s::timestamptz and not c.paused
       and (c.error is distinct from left(%(reason)s::text, 500) or c.error_at < clock_timestamp() - interval '1 minute')
       for update skip locked
  ) f
 where s.name = f.name
