-- Those of these uids whose events are in the log, or scheduled, and those that were discarded.
select u.uid, false as discarded
  from unnest(%(uids)s::uuid[]) u (uid)
 where outbox_internal.event_id(u.uid) is not null
union
select s.uid, false from outbox.scheduled s where s.uid = any (%(uids)s::uuid[])
union
select m.uid, true from outbox.discarded m where m.uid = any (%(uids)s::uuid[])
