-- The floor, and whether the stored numbers can be this server's: the cluster is the log's, ids are at most the
-- sequence's value, and xids are below the next one. Rows up to the floor, and windows that end where everything is
-- visible, belong to an older numbering and are left out.
select (select m.floor from outbox.meta m) as floor,
       coalesce((select max(e.id) from outbox.event e), 0) > (select s.last_value from outbox.event_id_seq s) as ids_ahead,
       greatest(
           0,
           (select max(n.xid::text::bigint)
              from (select e.xid from outbox.event e
                     where e.id > (select m.floor from outbox.meta m) order by e.id desc limit 1000) n),
           (select max(greatest(p.a_next, p.b_next))
              from outbox.sink k
             cross join lateral (
                select g.a_next, g.b_next, g.b_snapshot from outbox.progress g
                 where g.sink = k.name and g.seq >= k.ledger_start offset 0
             ) p
             where p.b_snapshot is null or p.b_snapshot::text <> '9223372036854775807:9223372036854775807:')
       ) as highest_xid,
       outbox_internal.elsewhere() as elsewhere
