-- The types of these uids' events in the log.
select distinct e.type from outbox.event e where e.uid = any (%(uids)s::uuid[]) order by e.type
