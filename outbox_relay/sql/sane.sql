-- Whether what is stored can belong to this server's numbering: ids below the sequence, xids below the next.
select coalesce((select max(id) from outbox.event), 0) > (select last_value from outbox.event_id_seq) as ids_ahead,
       greatest(
           coalesce((select e.xid::text::bigint from outbox.event e order by e.xid desc limit 1), 0),
           coalesce((select max(greatest(p.a_next, p.b_next)) from outbox.progress p), 0)
       ) as highest_xid
