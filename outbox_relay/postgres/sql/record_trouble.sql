-- Record an error that the client of a sink met without an event, for people. Null clears such an error, which begins
-- with "client: ", and no other. An open circuit has a better error, which is kept.
update outbox.sink k
   set last_error = %(error)s::text,
       last_error_at = case when %(error)s::text is not null then clock_timestamp() end
 where k.name = %(sink)s
   and k.circuit = 'closed'
   and (%(error)s::text is not null or k.last_error like 'client: %%')
