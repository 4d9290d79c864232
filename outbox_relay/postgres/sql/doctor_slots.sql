-- Replication slots that keep much WAL.
select s.slot_name::text as name, s.active, quote_literal(s.slot_name) as quoted,
       pg_catalog.pg_wal_lsn_diff(case when pg_is_in_recovery() then pg_last_wal_receive_lsn() else pg_current_wal_lsn() end,
                                  s.restart_lsn)::bigint as bytes
  from pg_catalog.pg_replication_slots s
 where s.restart_lsn is not null
   and pg_catalog.pg_wal_lsn_diff(case when pg_is_in_recovery() then pg_last_wal_receive_lsn() else pg_current_wal_lsn() end,
                                  s.restart_lsn) > %(bytes)s::bigint
 order by bytes desc
 limit 10
