-- The position of each shard, from the start of the ledger of its sink. With OFFSET, so that no plan reads the
-- ledger before it knows where that starts.
create or replace view outbox.standing as
select distinct on (k.name, u.shard)
       k.name as sink, u.shard, u.epoch, p.seq, p.a_seq, p.a_snapshot, p.a_next, p.b_seq, p.b_snapshot, p.b_next, p.last_id
  from outbox.sink k
 cross join lateral (select g.* from outbox.progress g where g.sink = k.name and g.seq >= k.ledger_start offset 0) p
 cross join lateral unnest(p.shards, p.epochs) u (shard, epoch)
 order by k.name, u.shard, u.epoch desc, p.seq desc;
comment on view outbox.standing is
    'The position of each shard of each sink: the row of outbox.progress that counts.';

create or replace view outbox.owned as
select s.sink, s.shard, s.owner, s.epoch, s.generation, s.crashes, n.lease_until
  from outbox.shard s
  join outbox.session n on n.sink = s.sink and n.owner = s.owner and n.lease_until > clock_timestamp();
comment on view outbox.owned is
    'The shards that relays own: those with an owner whose session has not ended.';

-- The privileges of each kind of role, with which `migrate` grants. What is not listed here belongs to the owner alone.
--
-- Functions with the rights of their caller give nothing away, and every kind that reads tables may call those of
-- outbox_internal. Those with the owner's rights are listed, a line for each file that defines them and each kind; so are
-- all of schema outbox. A relay reads and writes every table but the log, what consumers marked, and those that say
-- who did and who may do what, and what may be deleted. Who acts or may see payloads may look at all that kind `read`
-- lists, where payloads, headers and secrets are left out.
create or replace view outbox.privilege (kind, object_type, name, columns, privilege) as
select k.kind, l.object_type, n.name, l.columns, l.privilege
  from (values
    ('emit', 'schema', '{outbox}'::text[], null::text[], 'USAGE'),
    ('consume', 'schema', '{outbox}', null, 'USAGE'),
    ('relay', 'schema', '{outbox, outbox_internal}', null, 'USAGE'),
    ('read', 'schema', '{outbox, outbox_internal}', null, 'USAGE'),

    -- archives. A role that cannot read a day cannot record that an archive has it.
    ('relay', 'function', '{begin_archive, read_day_events, record_archive, unfinished_archives}', null, 'EXECUTE'),
    ('payloads', 'function', '{begin_archive, read_day_events, record_archive, unfinished_archives}', null, 'EXECUTE'),
    -- attempts
    ('relay', 'function', '{attempts_of, last_attempt_of, record_attempts, trim_attempts}', null, 'EXECUTE'),
    ('read', 'function', '{attempts_of, last_attempt_of}', null, 'EXECUTE'),
    ('operate', 'function', '{trim_attempts}', null, 'EXECUTE'),
    -- deliveries
    ('relay', 'function', '{count_deliveries, deliveries, delivery_summary, find_deliveries}', null, 'EXECUTE'),
    ('read', 'function', '{count_deliveries, deliveries, delivery_summary, find_deliveries}', null, 'EXECUTE'),
    ('operate', 'function', '{discard_deliveries, retry_deliveries}', null, 'EXECUTE'),
    -- emit
    ('emit', 'function', '{emit, emit_raw, emitted, event_index}', null, 'EXECUTE'),
    ('relay', 'function', '{event_id}', null, 'EXECUTE'),
    ('read', 'function', '{event_id}', null, 'EXECUTE'),
    -- erase
    ('operate', 'function', '{erase}', null, 'EXECUTE'),
    -- explain
    ('relay', 'function', '{trim_discarded, trim_routes, why}', null, 'EXECUTE'),
    ('read', 'function', '{why}', null, 'EXECUTE'),
    -- figures
    ('relay', 'function', '{backlog}', null, 'EXECUTE'),
    ('read', 'function', '{backlog}', null, 'EXECUTE'),
    -- inbox
    ('consume', 'function', '{once}', null, 'EXECUTE'),
    ('relay', 'function', '{trim_inbox}', null, 'EXECUTE'),
    ('operate', 'function', '{trim_inbox}', null, 'EXECUTE'),
    -- notices
    ('relay', 'function', '{notify_sinks}', null, 'EXECUTE'),
    -- partitions
    ('relay', 'function', '{make_partitions}', null, 'EXECUTE'),
    -- queue
    ('relay', 'function', '{queue_due_rows}', null, 'EXECUTE'),
    -- read
    ('relay', 'function', '{arm, home}', null, 'EXECUTE'),
    ('read', 'function', '{home}', null, 'EXECUTE'),
    -- replays
    ('relay', 'function', '{read_replayed, replays, settle_replayed, spend_replay, tend_replay}', null, 'EXECUTE'),
    ('read', 'function', '{replays}', null, 'EXECUTE'),
    ('operate', 'function', '{preview_replay, set_replay, start_replay}', null, 'EXECUTE'),
    -- retention
    ('relay', 'function', '{begin_retention, check_day, count_day, discard_expired, drop_day, empty_day, end_retention, '
                          'leave_day, past_days, renew_retention, retention_status, trim_uids}', null, 'EXECUTE'),
    ('read', 'function', '{retention_status}', null, 'EXECUTE'),
    ('operate', 'function', '{begin_retention, check_day, count_day, discard_expired, drop_day, empty_day, end_retention, '
                            'leave_day, past_days, renew_retention, trim_uids}', null, 'EXECUTE'),
    -- scheduled
    ('emit', 'function', '{cancel, reschedule}', null, 'EXECUTE'),
    ('relay', 'function', '{enter_scheduled}', null, 'EXECUTE'),
    -- schedules
    ('relay', 'function', '{fire_schedule_times}', null, 'EXECUTE'),
    ('operate', 'function', '{run_schedule, set_schedule}', null, 'EXECUTE'),
    -- settle
    ('relay', 'function', '{raise_ledger_starts}', null, 'EXECUTE'),
    -- sinks
    ('relay', 'function', '{list_sinks, probe_sink, register_sinks, set_paused}', null, 'EXECUTE'),
    ('read', 'function', '{list_sinks}', null, 'EXECUTE'),
    ('operate', 'function', '{drop_sink, preview_removal, preview_seek, probe_sink, seek_sink, '
                            'set_paused}', null, 'EXECUTE'),
    -- unique_keys
    ('emit', 'function', '{lock_unique_keys}', null, 'EXECUTE'),
    ('relay', 'function', '{finish_unique_keys}', null, 'EXECUTE'),

    ('relay', 'sequence', '{event_id_seq, server_mark}', null, 'SELECT'),
    ('relay', 'sequence', '{schedule_generation}', null, 'USAGE'),
    ('relay', 'table', '{event_default}', null, 'SELECT'),
    ('relay', 'table', '{delivery, figures, history, progress, relay, schedule, session}', null, 'INSERT'),
    ('relay', 'table', '{delivery, figures, history, relay, schedule, session, shard, sink}', null, 'UPDATE'),
    ('relay', 'table', '{delivery, history, progress, relay, session}', null, 'DELETE'),

    ('read', 'table', '{audit, discarded, former_sink, history, meta, missing_privilege, owned, progress, session, shard, '
                      'sink, standing}', null, 'SELECT'),
    -- `config` is for those who operate; outbox.retention_status shows `retention`.
    ('read', 'table', '{relay}', '{id, name, version, sinks, started_at, seen_at}', 'SELECT'),
    ('read', 'table', '{event}', '{xid, id, shard, uid, type, key, content_type, deliver_at, created_at, emitter, tenant, '
                               'priority, emitted_at}', 'SELECT'),
    ('read', 'table', '{scheduled}', '{xid, id, uid, type, key, content_type, deliver_at, created_at, emitter, emitter_oid, '
                                   'tenant, priority}', 'SELECT'),
    ('read', 'table', '{event_default}', '{id}', 'SELECT'),
    ('read', 'table', '{delivery}',
     '{sink, id, shard, state, ordered, due_at, priority, attempts, claims, suspect, lease, lease_until, owner, last_error, '
     'last_status, last_attempt_at, since, uid, type, key, content_type, deliver_at, created_at, replay, '
     'emitter, tenant, turn, ready}', 'SELECT'),
    ('read', 'table', '{attempt}', '{at, uid, sink, id, number, relay, outcome, status, milliseconds, error}', 'SELECT'),
    ('read', 'table', '{figures}', '{owner, lease_until, at, figures}', 'SELECT'),
    ('read', 'table', '{schedule}', '{name, cron, timezone, type, key, missed, generation, after_at, next_at, last_at, paused, '
                                    'retry_at, error, error_at, tenant}', 'SELECT'),
    -- The answer of a destination may repeat the payload.
    ('payloads', 'table', '{delivery}', '{payload, headers, last_attempt}', 'SELECT'),
    ('payloads', 'table', '{event, schedule, scheduled}', '{payload, headers}', 'SELECT'),
    ('payloads', 'table', '{attempt}', '{detail}', 'SELECT'),
    ('operate', 'table', '{relay}', '{config, schedules}', 'SELECT'),
    ('operate', 'table', '{secret}', '{config_key}', 'SELECT'),
    ('relay', 'table', '{secret}', '{config_key}', 'SELECT')
  ) l (kind, object_type, names, columns, privilege)
 cross join lateral unnest(l.names) n (name)
 cross join lateral unnest(case l.kind when 'read' then '{read, operate, payloads}' else array[l.kind] end) k (kind)
union all
select k.kind, 'function', p.proname, null, 'EXECUTE'
  from pg_proc p cross join unnest('{relay, read, operate, payloads}'::text[]) k (kind)
 where p.pronamespace = 'outbox_internal'::regnamespace and not p.prosecdef and p.prorettype <> 'trigger'::regtype
   and p.proname !~ 'debezium'
union all
select 'relay', 'table', c.relname, null, 'SELECT'
  from pg_class c
 where c.relnamespace = 'outbox'::regnamespace and c.relkind in ('r', 'p', 'v') and not c.relispartition
   and c.relname not in ('secret', 'inbox');
comment on view outbox.privilege is
    'The privileges that migrate grants to each kind of role.';

-- Privileges in the schema that no role should have: those of roles other than the owner that are not listed above for
-- a kind that the role was granted, or that the role may pass on. `role_name` is null for PUBLIC.
create or replace view outbox.foreign_privilege (role_name, object_type, object, name, column_name, privilege) as
with held as (
    select 'schema' as object_type, n.oid as object, n.nspname::text as name, null::text as column_name,
           n.nspowner as owner, a.*
      from pg_namespace n cross join lateral aclexplode(n.nspacl) a
     where n.nspname in ('outbox', 'outbox_internal')
    union all
    select case c.relkind when 'S' then 'sequence' else 'table' end, c.oid, c.relname, null, c.relowner, a.*
      from pg_class c cross join lateral aclexplode(c.relacl) a
     where c.relnamespace = 'outbox'::regnamespace
    union all
    select 'table', c.oid, c.relname, t.attname, c.relowner, a.*
      from pg_class c join pg_attribute t on t.attrelid = c.oid cross join lateral aclexplode(t.attacl) a
     where c.relnamespace = 'outbox'::regnamespace
    union all
    select 'function', p.oid, p.proname, null, p.proowner, a.*
      from pg_proc p cross join lateral aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
     where p.pronamespace = any ('{outbox, outbox_internal}'::regnamespace[])
)
select distinct r.rolname::text, h.object_type, h.object, h.name, h.column_name, h.privilege_type
  from held h left join pg_roles r on r.oid = h.grantee
 where h.grantee <> h.owner
   and (h.is_grantable or not exists (
        select from outbox.grantee g join outbox.privilege p on p.kind = g.kind
         where g.role_name = r.rolname and p.object_type = h.object_type and p.privilege = h.privilege_type
           and p.name = h.name
           and case when h.column_name is null then p.columns is null else h.column_name = any (p.columns) end));
comment on view outbox.foreign_privilege is
    'Privileges of other roles in the schema that migrate did not grant. `role_name` is null for PUBLIC.';

-- Privileges of the kinds that roles were granted, as far as the roles lack them. Those of other roles that they inherit count.
create or replace view outbox.missing_privilege (role_name, kind, object_type, name, privilege) as
select distinct g.role_name::text, g.kind, p.object_type, p.name, p.privilege
  from outbox.grantee g
  join pg_roles r on r.rolname = g.role_name
  join outbox.privilege p on p.kind = g.kind
  left join pg_class c on p.object_type in ('table', 'sequence') and c.relnamespace = 'outbox'::regnamespace and c.relname = p.name
  left join pg_proc f on p.object_type = 'function' and f.pronamespace = any ('{outbox, outbox_internal}'::regnamespace[]) and f.proname = p.name
 where not case p.object_type
           when 'schema' then has_schema_privilege(r.oid, p.name, p.privilege)
           when 'function' then f.oid is null or has_function_privilege(r.oid, f.oid, p.privilege)
           when 'sequence' then c.oid is null or has_sequence_privilege(r.oid, c.oid, p.privilege)
           else c.oid is null or has_table_privilege(r.oid, c.oid, p.privilege)
                or p.columns is not null and (select bool_and(has_column_privilege(r.oid, c.oid, k.name, p.privilege))
                                                from unnest(p.columns) k (name))
           end;
comment on view outbox.missing_privilege is
    'Privileges that migrate granted and that the roles lack now.';

-- Privileges that roles get on whatever the owner of the schema makes, in it or anywhere.
create or replace view outbox.foreign_default_privilege (owner_name, role_name, object_type, privilege) as
select distinct o.rolname::text, r.rolname::text, t.object_type, a.privilege_type
  from pg_default_acl d
  join pg_namespace n on n.nspname in ('outbox', 'outbox_internal') and n.nspowner = d.defaclrole and d.defaclnamespace in (0, n.oid)
  join pg_roles o on o.oid = d.defaclrole
  join (values ('r', 'table'), ('S', 'sequence'), ('f', 'function')) t (letter, object_type) on t.letter = d.defaclobjtype
 cross join lateral aclexplode(d.defaclacl) a
  left join pg_roles r on r.oid = a.grantee
 where a.grantee <> d.defaclrole and (a.grantee <> 0 or t.object_type <> 'function');
comment on view outbox.foreign_default_privilege is
    'Default privileges by which other roles get rights on whatever the owner of the schema makes.';
