-- The payload of a row that was claimed without it, or the reason why it is not loaded.
select case when octet_length(d.payload) <= outbox_internal.payload_ceiling() then d.payload end as payload,
       case when octet_length(d.payload) > outbox_internal.payload_ceiling()
            then format('payload has %%s bytes, more than the ceiling of %%s', octet_length(d.payload),
                        outbox_internal.payload_ceiling()) end as fault
  from outbox.delivery d
 where d.sink = %(sink)s and d.id = %(id)s and d.lease = %(lease)s
   and d.payload is not null
