-- Those of these events that were discarded. An id alone does not name an event: after a restore two may have the same.
-- The inner query is looked up for each event by the primary key, however many marks there are.
select e.id
  from unnest(%(ids)s::bigint[], %(uids)s::uuid[]) e (id, uid)
 where (select m.uid from outbox.discarded m where m.sink = %(sink)s and m.id = e.id) = e.uid
   and outbox_internal.only_at(%(server)s::text)
