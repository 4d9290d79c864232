-- The payload of a row that was claimed without it.
select d.payload
  from outbox.delivery d
 where d.sink = %(sink)s and d.id = %(id)s and d.lease = %(lease)s
   and octet_length(d.payload) <= outbox.payload_ceiling()
