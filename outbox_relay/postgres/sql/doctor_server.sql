-- Settings and ages of the server that the safety and the speed of the log depend on.
select current_setting('fsync') as fsync, current_setting('full_page_writes') as full_page_writes,
       current_setting('synchronous_commit') as synchronous_commit, current_setting('autovacuum') as autovacuum,
       (select coalesce(array_agg(distinct r.rolname::text order by r.rolname::text), '{}')
          from pg_catalog.pg_db_role_setting s join pg_catalog.pg_roles r on r.oid = s.setrole
         where s.setdatabase in (0, (select d.oid from pg_catalog.pg_database d where d.datname = current_database()))
           and 'synchronous_commit=off' = any (s.setconfig)
           and has_function_privilege(r.oid, 'outbox.emit'::regproc::oid, 'execute')) as uncertain_roles,
       (select s.seqcache from pg_catalog.pg_sequence s where s.seqrelid = 'outbox.event_id_seq'::regclass) as seq_cache,
       (select age(d.datfrozenxid)::bigint from pg_catalog.pg_database d where d.datname = current_database()) as xid_age,
       (select (s.setting::bigint) from pg_catalog.pg_settings s where s.name = 'autovacuum_freeze_max_age') as freeze_max_age,
       (select mxid_age(d.datminmxid)::bigint from pg_catalog.pg_database d where d.datname = current_database()) as mxid_age,
       (select (s.setting::bigint) from pg_catalog.pg_settings s where s.name = 'autovacuum_multixact_freeze_max_age')
           as mxid_freeze_max_age,
       pg_has_role(current_user, 'pg_read_all_stats', 'usage') as sees_all,
       quote_ident(current_user) as role,
       extract(epoch from clock_timestamp())::double precision as clock
