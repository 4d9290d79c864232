-- Record the last error of a sink whose circuit is closed, for people.
update outbox.sink set last_error = %(error)s::text, last_error_at = clock_timestamp()
 where name = %(sink)s and circuit = 'closed'
