-- What the client of a sink has found out without an event, for people; null clears such an error, which begins with
-- "client: ", and no other. The circuit says more once it is open.
update outbox.sink k
   set last_error = %(error)s::text,
       last_error_at = case when %(error)s::text is not null then clock_timestamp() end
 where k.name = %(sink)s
   and k.circuit = 'closed'
   and (%(error)s::text is not null or k.last_error like 'client: %%')
