-- True if the numbers of the log are another server's. Only some roles may read the sequence.
select outbox_internal.elsewhere()
       or coalesce(
           (select max(n.xid::text::bigint)
              from (select e.xid from outbox.event e
                     where e.id > (select m.floor from outbox.meta m) order by e.id desc limit 1000) n)
           >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint, false)
       or case when has_sequence_privilege('outbox.event_id_seq', 'select')
               then coalesce((select max(e.id) from outbox.event e), 0)
                    > coalesce(pg_sequence_last_value('outbox.event_id_seq'::regclass), 0)
               else false end as foreign_numbers
