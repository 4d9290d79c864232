-- Let scheduled events that are due enter the log: how many, the place of the last one, and the seconds until the next is due.
select e.entered, e.last_time::text as last_time, e.last_id, e.due_in::double precision as due_in
  from outbox_internal.enter_scheduled(
    %(most)s::integer, coalesce(%(after_time)s::text::timestamptz, '-infinity'), coalesce(%(after_id)s::bigint, 0)) e
