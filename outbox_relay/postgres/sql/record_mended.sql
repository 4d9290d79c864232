-- Record that the last error of a sink is over: its circuit is closed, and an event was delivered after the error. An error
-- that another relay may still meet is not over before that relay had time to record it again. An error that the client
-- met without an event is cleared by record_trouble.
update outbox.sink k
   set last_error_mended_at = clock_timestamp()
 where k.name = %(sink)s
   and k.circuit = 'closed'
   and k.last_error not like 'client: %%'
   and (k.last_error_mended_at < k.last_error_at) is not false
   and (%(own)s::boolean or k.last_error_at < clock_timestamp() - interval '3 minutes')
