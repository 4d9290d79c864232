-- The types of these uids' events in the log.
select distinct e.type
  from outbox.event e
 where e.id = any (array(select outbox_internal.event_id(u.uid) from unnest(%(uids)s::uuid[]) u (uid)))
   and e.uid = any (%(uids)s::uuid[])
 order by e.type
