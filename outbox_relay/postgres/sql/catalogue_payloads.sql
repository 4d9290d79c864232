-- The payloads of these events of the log, newest first.
select e.uid, coalesce(e.content_type, 'application/json') as content_type, coalesce(e.payload, ''::bytea) as payload
  from outbox.event e
 where e.id = any (%(ids)s::bigint[]) and e.content_type is distinct from 'application/x-erased'
 order by e.id desc
