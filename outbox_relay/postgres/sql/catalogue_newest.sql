-- The newest events of each type, among the last of the log, newest first and without their payloads.
with newest as materialized (
    select e.id, e.type, e.content_type, octet_length(e.payload) as bytes
      from outbox.event e
     order by e.id desc
     limit %(look_back)s::integer
), ranked as (
    select n.id, n.type, n.bytes, row_number() over (partition by n.type order by n.id desc) as place
      from newest n
     where n.content_type is distinct from 'application/x-erased' and n.type not like 'outbox.%%'
)
select r.id, r.type, coalesce(r.bytes, 0) as bytes
  from ranked r
 where r.place <= %(newest)s::integer
 order by r.id desc
