-- The payloads of these events of the log, newest first.
select e.uid, e.content_type, coalesce(e.payload, ''::bytea) as payload
  from outbox.event e
 where e.id = any (%(ids)s::bigint[]) and e.content_type <> 'application/x-erased'
 order by e.id desc
