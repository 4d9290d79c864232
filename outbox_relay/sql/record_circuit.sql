-- What this relay has found out about the destination, for people.
update outbox.sink
   set circuit = %(circuit)s,
       last_error = coalesce(%(error)s::text, last_error),
       last_error_at = case when %(error)s::text is null then last_error_at else clock_timestamp() end
 where name = %(sink)s and (circuit <> %(circuit)s or %(error)s::text is not null)
