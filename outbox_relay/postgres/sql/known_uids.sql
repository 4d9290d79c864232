-- Those of these uids whose events are in the log, and those that were discarded.
select e.uid, false as discarded from outbox.event e where e.uid = any (%(uids)s::uuid[])
union
select m.uid, true from outbox.discarded m where m.uid = any (%(uids)s::uuid[])
