-- Gives every role of outbox.grantee what its kind needs on the schema as it now is, and takes everything else from
-- every role but the owner. `migrate` runs it each time; it can be run again at any time.
--
-- An application (kind `emit`) may call six functions and nothing else, and a consumer (kind `consume`) one. A relay may
-- read everything, write its positions and exceptions, and never change the log. UPDATE of any column is what row locks ask
-- for. Every other action is a function that an operator's role may call.

-- The privileges of roles. A function, table or sequence that is not listed here belongs to the owner alone. Functions
-- of kind `owner` are called by the owner alone: a test compares this list with the schema.
--
-- Who acts or may see payloads may look at all that kind `read` lists, where payloads and headers are left out.
create or replace view outbox.privilege (kind, object_type, name, columns, privilege) as
select k.kind, l.object_type, n.name, l.columns, l.privilege
  from (values
    ('emit', 'schema', '{outbox}'::text[], null::text[], 'USAGE'),
    ('emit', 'function', '{cancel, emit, emit_raw, emitted, lock_unique_keys, reschedule}', null, 'EXECUTE'),

    ('consume', 'schema', '{outbox}', null, 'USAGE'),
    ('consume', 'function', '{once}', null, 'EXECUTE'),

    ('relay', 'schema', '{outbox}', null, 'USAGE'),
    ('relay', 'function', '{arm, backlog, claim_rows, give_rows_back, held_keys, keys_with_rows, known_down, look, look_small, '
                          'make_partitions, only_at, payload_ceiling, positions, raise_ledger_starts, read_late, read_rest, '
                          'read_small, register_missing_sinks, register_sinks, renew_shards, rows_standing, '
                          'settle, tick, trim_progress}', null, 'EXECUTE'),
    -- Called by functions of the line above, with the rights of their caller.
    ('relay', 'function', '{delivery_fault, first_dead, incarnation, lease_term, leased_shards, unsettled}', null, 'EXECUTE'),
    ('relay', 'table', '{delivery, event, event_default, grantee, meta, progress, relay, shard, sink, standing, uid}',
     null, 'SELECT'),
    ('relay', 'table', '{foreign_default_privilege, foreign_privilege, missing_privilege}', null, 'SELECT'),
    ('read', 'table', '{missing_privilege}', null, 'SELECT'),
    ('relay', 'table', '{discarded, scheduled_change}', null, 'SELECT'),
    -- Scheduled events that are changed, and unique keys.
    ('relay', 'function', '{apply_scheduled_changes, finish_unique_keys, is_untouched, mark_cancelled, take_scheduled, '
                          'trim_scheduled_changes}', null, 'EXECUTE'),
    -- The queue of sinks with claim = "rows".
    ('relay', 'function', '{claim_queued, due_rows, give_queued_back, next_tenants, park_window, queue_due_rows}', null, 'EXECUTE'),
    ('owner', 'function', '{may_change_claim, row_revived, row_went_early}', null, 'EXECUTE'),
    ('owner', 'function', '{change_scheduled, claim_unique_key, drop_cancelled, not_to_replay, queue_fault, require_own_key, '
                          'scheduled_event, uid_lock}', null, 'EXECUTE'),
    ('relay', 'table', '{sink}', '{last_error_mended_at}', 'UPDATE'),
    ('relay', 'sequence', '{event_id_seq, server_mark}', null, 'SELECT'),
    ('relay', 'table', '{sink}', '{circuit, circuit_since, in_flight_limit, last_error, last_error_at, paused, '
                                 'paused_reason}', 'UPDATE'),
    ('relay', 'table', '{shard}', '{owner, epoch, lease_until, crashes}', 'UPDATE'),
    ('relay', 'table', '{progress, delivery}', null, 'INSERT'),
    ('relay', 'table', '{delivery}', '{state, ready, due_at, attempts, claims, suspect, lease, lease_until, owner, last_error, '
                                     'last_status, last_attempt_at, last_attempt}', 'UPDATE'),
    -- Not `retention`: outbox.state_retention checks it.
    ('relay', 'table', '{relay}', '{id, name, version, sinks, started_at, seen_at, config}', 'INSERT'),
    ('relay', 'table', '{relay}', '{id, name, version, sinks, started_at, seen_at, config}', 'UPDATE'),
    ('relay', 'table', '{progress, delivery, relay}', null, 'DELETE'),
    ('relay', 'function', '{attempts_of, last_attempt_of, make_attempt_partitions, record_attempts}', null, 'EXECUTE'),
    ('relay', 'table', '{attempt}', null, 'SELECT'),

    ('relay', 'function', '{as_time, count_deliveries, deliveries, delivery_state, delivery_summary, error_kind, loadable_time, '
                          'past_time, position_passed, probe_sink, set_paused, was_counted}', null, 'EXECUTE'),
    ('relay', 'table', '{audit, discarded, page_key}', null, 'SELECT'),

    ('read', 'schema', '{outbox}', null, 'USAGE'),
    ('read', 'function', '{as_time, backlog, count_deliveries, deliveries, delivery_state, delivery_summary, error_kind, '
                         'loadable_time, past_time, position_passed, was_counted}', null, 'EXECUTE'),
    ('read', 'table', '{page_key}', null, 'SELECT'),
    ('read', 'table', '{audit, discarded, meta, progress, shard, sink, standing}', null, 'SELECT'),
    -- Not `config` and `retention`: outbox.relay_configs and outbox.retention_status show them.
    ('read', 'table', '{relay}', '{id, name, version, sinks, started_at, seen_at}', 'SELECT'),
    ('read', 'table', '{event}', '{xid, id, shard, uid, type, key, content_type, deliver_at, created_at, emitter, tenant, '
                               'priority}', 'SELECT'),
    ('read', 'table', '{event_default}', '{id}', 'SELECT'),
    ('read', 'table', '{delivery}',
     '{sink, id, shard, state, ordered, due_at, priority, attempts, claims, suspect, lease, lease_until, owner, last_error, '
     'last_status, last_attempt_at, since, uid, type, key, content_type, deliver_at, created_at, replay, '
     'emitter, tenant, ready}', 'SELECT'),
    ('read', 'table', '{attempt}', '{at, uid, sink, id, number, relay, outcome, status, milliseconds, error}', 'SELECT'),
    ('read', 'function', '{attempts_of, last_attempt_of}', null, 'EXECUTE'),
    ('payloads', 'table', '{event, delivery}', '{payload, headers}', 'SELECT'),
    -- The answer of a destination may repeat the payload.
    ('payloads', 'table', '{delivery}', '{last_attempt}', 'SELECT'),
    ('payloads', 'table', '{attempt}', '{detail}', 'SELECT'),
    ('operate', 'function', '{discard_deliveries, probe_sink, retry_deliveries, set_paused}', null, 'EXECUTE'),

    ('owner', 'function', '{discard_rows, hashed_filter, is_meant, keyed_hash, lock_shards_of, marks_deleted, '
                          'is_of_tenant, next_deliveries, read_filter, record_action, require_read_committed, require_sink, '
                          'row_died, short_text, sink_paused, was_before}', null, 'EXECUTE'),

    -- Sinks and configurations.
    ('relay', 'function', '{list_former_sinks, list_sinks, relay_configs}', null, 'EXECUTE'),
    ('relay', 'table', '{config_key, former_sink}', null, 'SELECT'),
    ('read', 'function', '{list_former_sinks, list_sinks}', null, 'EXECUTE'),
    ('read', 'table', '{former_sink}', null, 'SELECT'),
    ('operate', 'table', '{config_key}', null, 'SELECT'),
    ('operate', 'function', '{action_tick, drop_sink, preview_removal, preview_seek, relay_configs, rename_sink, seek_sink}',
     null, 'EXECUTE'),
    ('owner', 'function', '{sees_payloads, shown_detail}', null, 'EXECUTE'),
    ('owner', 'function', '{bounded_count, bounded_seconds, count_backlog, delete_rows, end_when_idle}', null, 'EXECUTE'),
    ('owner', 'function', '{alive_interval, check_action_tick, check_sink_name, count_seek, count_unsettled, first_id_since, move_rows, '
                          'refuse_sink, relays_of, seek_place, types_of}',
     null, 'EXECUTE'),

    -- Replays.
    ('relay', 'function', '{attempt_detail, read_replay, read_replayed, replay_of, replays, settle_replay, settle_replayed, sink_of, '
                          'spend_replay, tend_replay, trim_replay_exceptions}', null, 'EXECUTE'),
    ('relay', 'table', '{replay, replay_progress}', null, 'SELECT'),
    ('read', 'function', '{replays}', null, 'EXECUTE'),
    ('operate', 'function', '{preview_replay, set_replay, start_replay}', null, 'EXECUTE'),
    ('owner', 'function', '{adopt_rebase, at_its_end, clear_replay, count_matches, drop_replay_rows, follow_rename, id_behind, move_dead, '
                          'place_replay, plan_replay, replay_delivered, replay_keepers, replay_means, replay_outcome, '
                          'replay_outcomes, replay_passed_by, replay_places, replay_rows, replay_shards, replays_cancelled, '
                          'require_days, trim_replay}', null, 'EXECUTE'),

    -- Retention: done by relays, and by roles that operate; roles that read see the days.
    ('relay', 'function', '{begin_archive, begin_retention, check_day, count_day, discard_expired, drop_day, due_days, '
                          'empty_day, end_retention, leave_day, read_day, read_day_events, record_archive, renew_retention, retention_status, '
                           'state_retention, trim_attempts, trim_inbox, trim_uids, unfinished_archives}', null, 'EXECUTE'),
    ('operate', 'schema', '{outbox}', null, 'USAGE'),
    ('operate', 'table', '{meta}', null, 'SELECT'),
    ('operate', 'function', '{begin_retention, check_day, count_day, discard_expired, drop_day, due_days, empty_day, '
                            'end_retention, leave_day, renew_retention, retention_status, trim_attempts, trim_inbox, trim_uids}',
     null, 'EXECUTE'),
    ('read', 'schema', '{outbox}', null, 'USAGE'),
    ('read', 'table', '{meta}', null, 'SELECT'),
    ('read', 'function', '{retention_status}', null, 'EXECUTE'),
    -- A role that cannot read a day cannot record that an archive has it.
    ('payloads', 'function', '{begin_archive, read_day, read_day_events, record_archive, unfinished_archives}', null, 'EXECUTE'),
    ('relay', 'function', '{keep_days_of}', null, 'EXECUTE'),
    ('read', 'function', '{keep_days_of}', null, 'EXECUTE'),
    ('owner', 'function', '{acts_as, asks_less, at_home, came_since, checked_day, day_holders, day_keepers, died_before, '
                          'is_past, keep_archive_names, keeper_names, kept_since, lease_interval, mark_clock, more_days, part_of, partitions, past_days, '
                          'require_day, weigh_retention}', null, 'EXECUTE'),

    -- Passes.
    ('relay', 'function', '{trim_discarded, trim_passes, why}', null, 'EXECUTE'),
    ('read', 'function', '{event_states, why}', null, 'EXECUTE'),
    ('owner', 'function', '{begin_claimed, begin_passes, end_passes, in_seconds, keep_late, keep_patterns, keep_rows_ahead, '
                          'mark_generation, move_passes, newest_xid, pass_spans, passage, passage_states, passes_deleted, '
                          'recorded_deliveries, '
                          'type_matches}', null, 'EXECUTE'),
    -- Erase.
    ('operate', 'function', '{erase}', null, 'EXECUTE'),
    -- Called by functions that read the log, with the rights of their caller.
    ('relay', 'function', '{is_erased}', null, 'EXECUTE'),
    ('owner', 'function', '{archives_of_subject, change_events, check_erasable, content_columns, content_statistics, '
                          'erase_in_audit, erase_in_sinks, fill_shard, filter_of_subject, keep_no_statistics, look_again, '
                          'next_of_subject, open_erasure, read_subject, renew_key_statistics, shard_of, '
                          'supersede_archives, undelivered, undelivered_of_subject}', null, 'EXECUTE'),

    ('owner', 'function', '{bring_sinks_home, find_foreign_sink, follow_renamed_roles, home}', null, 'EXECUTE'),
    -- Figures and history.
    ('relay', 'function', '{add_history, claim_figures, figures_of_rows, figures_of_sinks, store_figures, trim_history}', null,
     'EXECUTE'),
    ('relay', 'table', '{history}', null, 'SELECT'),
    ('relay', 'table', '{figures}', '{owner, lease_until, at, figures}', 'SELECT'),
    ('read', 'function', '{figures_of_rows}', null, 'EXECUTE'),
    ('read', 'table', '{figures}', '{owner, lease_until, at, figures}', 'SELECT'),
    ('read', 'table', '{history}', null, 'SELECT'),
    ('owner', 'function', '{history_deleted, move_history}', null, 'EXECUTE'),
    -- Schedules.
    ('relay', 'function', '{fail_schedule, fire_schedule, fire_schedule_times, hold_schedules, place_schedule, '
                          'register_schedules, take_schedules}', null, 'EXECUTE'),
    ('relay', 'table', '{schedule}', '{name, cron, timezone, type, key, missed, generation, after_at, next_at, last_at, paused, '
                                     'retry_at, error, error_at, tenant}', 'SELECT'),
    ('read', 'table', '{schedule}', '{name, cron, timezone, type, key, missed, generation, after_at, next_at, last_at, paused, '
                                    'retry_at, error, error_at, tenant}', 'SELECT'),
    ('payloads', 'table', '{schedule}', '{payload, headers}', 'SELECT'),
    ('operate', 'function', '{relays_with_schedule, run_schedule, set_schedule}', null, 'EXECUTE'),
    ('owner', 'function', '{emit_schedule, require_schedule, schedule_changed}', null, 'EXECUTE'),
    -- Limits across relays.
    ('relay', 'function', '{spread_of, state_limits, take_tokens, tend_slots}', null, 'EXECUTE'),
    ('relay', 'table', '{sink_limit, sink_slot}', null, 'SELECT'),
    ('read', 'table', '{sink_limit, sink_slot}', null, 'SELECT'),
    ('owner', 'function', '{lock_limits, move_limits, slot_quotas, slots_given_up, spread_scheduled}', null, 'EXECUTE'),
    -- Notices.
    ('relay', 'function', '{notify_sinks}', null, 'EXECUTE'),
    ('owner', 'function', '{error_class, make_notice, notice_due, notices_deleted, notify_blocked, notify_dead, notify_sink, '
                          'notify_state, sink_lag}', null, 'EXECUTE'),

    ('owner', 'function', '{asleep, claim_uid, emitter, event_fault, header_fault, is_usual, keep_positions, raise_config, '
                          'rebase, remove_sink, renumber, settled_upto, shown, sink_changed, sink_deleted, uuid7}',
     null, 'EXECUTE')
  ) l (kind, object_type, names, columns, privilege)
 cross join lateral unnest(l.names) n (name)
 cross join lateral unnest(case l.kind when 'read' then '{read, operate, payloads}' else array[l.kind] end) k (kind);

-- Privileges in the schema that no role should have: those of roles other than the owner that are not listed above for
-- a kind that the role was granted, or that the role may pass on. `role_name` is null for PUBLIC.
create or replace view outbox.foreign_privilege (role_name, object_type, object, name, column_name, privilege) as
with held as (
    select 'schema' as object_type, n.oid as object, n.nspname::text as name, null::text as column_name,
           n.nspowner as owner, a.*
      from pg_namespace n cross join lateral aclexplode(n.nspacl) a
     where n.nspname = 'outbox'
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
     where p.pronamespace = 'outbox'::regnamespace
)
select distinct r.rolname::text, h.object_type, h.object, h.name, h.column_name, h.privilege_type
  from held h left join pg_roles r on r.oid = h.grantee
 where h.grantee <> h.owner
   and (h.is_grantable or not exists (
        select from outbox.grantee g join outbox.privilege p on p.kind = g.kind
         where g.role_name = r.rolname and p.object_type = h.object_type and p.privilege = h.privilege_type
           and p.name = h.name
           and case when h.column_name is null then p.columns is null else h.column_name = any (p.columns) end));

-- Privileges of the kinds that roles were granted, as far as the roles lack them. Those of other roles that they inherit count.
create or replace view outbox.missing_privilege (role_name, kind, object_type, name, privilege) as
select distinct g.role_name::text, g.kind, p.object_type, p.name, p.privilege
  from outbox.grantee g
  join pg_roles r on r.rolname = g.role_name
  join outbox.privilege p on p.kind = g.kind
  left join pg_class c on p.object_type in ('table', 'sequence') and c.relnamespace = 'outbox'::regnamespace and c.relname = p.name
  left join pg_proc f on p.object_type = 'function' and f.pronamespace = 'outbox'::regnamespace and f.proname = p.name
 where not case p.object_type
           when 'schema' then has_schema_privilege(r.oid, 'outbox', p.privilege)
           when 'function' then f.oid is null or has_function_privilege(r.oid, f.oid, p.privilege)
           when 'sequence' then c.oid is null or has_sequence_privilege(r.oid, c.oid, p.privilege)
           else c.oid is null or has_table_privilege(r.oid, c.oid, p.privilege)
                or p.columns is not null and (select bool_and(has_column_privilege(r.oid, c.oid, k.name, p.privilege))
                                                from unnest(p.columns) k (name))
           end;

-- Privileges that roles get on whatever the owner of the schema makes, in it or anywhere.
create or replace view outbox.foreign_default_privilege (owner_name, role_name, object_type, privilege) as
select distinct o.rolname::text, r.rolname::text, t.object_type, a.privilege_type
  from pg_default_acl d
  join pg_namespace n on n.nspname = 'outbox' and n.nspowner = d.defaclrole and d.defaclnamespace in (0, n.oid)
  join pg_roles o on o.oid = d.defaclrole
  join (values ('r', 'table'), ('S', 'sequence'), ('f', 'function')) t (letter, object_type) on t.letter = d.defaclobjtype
 cross join lateral aclexplode(d.defaclacl) a
  left join pg_roles r on r.oid = a.grantee
 where a.grantee <> d.defaclrole and (a.grantee <> 0 or t.object_type <> 'function');

do $grants$
declare
    schema_owner constant name := (select r.rolname from pg_namespace n join pg_roles r on r.oid = n.nspowner
                                    where n.nspname = 'outbox');
    item record;
begin
    -- A migration that another role applied made what the owner's functions could not use.
    for item in
        select case when c.relkind = 'S' then 'sequence' when c.relkind = 'v' then 'view' else 'table' end as kind,
               c.oid::regclass::text as name
          from pg_class c join pg_namespace n on n.oid = c.relnamespace
         where n.nspname = 'outbox' and c.relowner <> n.nspowner and c.relkind in ('r', 'p', 'v', 'S')
           -- A sequence of a column follows its table. Partitions depend on theirs too, and do not.
           and not (c.relkind = 'S' and exists (
                    select from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = c.oid
                                              and d.refclassid = 'pg_class'::regclass and d.deptype in ('a', 'i')))
        union all
        select 'type', c.reltype::regtype::text
          from pg_class c join pg_namespace n on n.oid = c.relnamespace
         where n.nspname = 'outbox' and c.relowner <> n.nspowner and c.relkind = 'c'
        union all
        select 'function', p.oid::regprocedure::text
          from pg_proc p join pg_namespace n on n.oid = p.pronamespace
         where n.nspname = 'outbox' and p.proowner <> n.nspowner
    loop
        execute format('alter %s %s owner to %I', item.kind, item.name, schema_owner);
    end loop;

    if to_regprocedure('outbox.follow_renamed_roles()') is not null then
        perform outbox.follow_renamed_roles();
    end if;
    delete from outbox.grantee g where not exists (select from pg_roles r where r.rolname = g.role_name);

    -- New functions belong to PUBLIC too, and the rights of a relay differ between versions: neither is reported.
    for item in
        select coalesce('role "' || f.role_name || '"', 'PUBLIC') as role, f.object_type, f.privileges,
               string_agg(f.name, ', ' order by f.name) as names
          from (
            select p.role_name, p.object_type, p.name,
                   string_agg(distinct p.privilege || coalesce(' (' || p.column_name || ')', ''), ', ') as privileges
              from outbox.foreign_privilege p
             where not (p.role_name is null and p.object_type = 'function' and exists (
                        select from pg_proc f where f.oid = p.object
                                               and f.xmin = pg_current_xact_id()::xid))
               and not exists (select from outbox.grantee g where g.role_name = p.role_name and g.kind = 'relay')
             group by p.role_name, p.object_type, p.name
          ) f
         group by f.role_name, f.object_type, f.privileges
         order by 1, 2, 3
    loop
        raise notice 'taken back from %: % on % %', item.role, item.privileges, item.object_type, item.names;
    end loop;
    for item in
        select d.owner_name, coalesce('role "' || d.role_name || '"', 'PUBLIC') as role, d.object_type,
               string_agg(d.privilege, ', ' order by d.privilege) as privileges
          from outbox.foreign_default_privilege d
         group by d.owner_name, d.role_name, d.object_type
         order by 2, 3
    loop
        raise notice 'default privileges of role "%" give % % on each new %: outbox-relay takes that back from what it makes',
            item.owner_name, item.role, item.privileges, item.object_type;
    end loop;

    for item in
        select f.object_type, f.privilege || coalesce(' (' || quote_ident(f.column_name) || ')', '') as privilege,
               case f.object_type when 'schema' then 'outbox' when 'function' then f.object::regprocedure::text
                                  else format('outbox.%I', f.name) end as name,
               case when f.role_name is null then 'public' else quote_ident(f.role_name) end as role
          from outbox.foreign_privilege f
    loop
        execute format('revoke %s on %s %s from %s cascade', item.privilege, item.object_type, item.name, item.role);
    end loop;
    for item in
        select g.role_name, p.object_type, p.privilege || coalesce(' (' || array_to_string(p.columns, ', ') || ')', '')
                   as privilege,
               case p.object_type when 'schema' then 'outbox'
                                  when 'function' then f.oid::regprocedure::text
                                  else format('outbox.%I', p.name) end as name
          from outbox.grantee g
          join outbox.privilege p on p.kind = g.kind
          left join pg_proc f on p.object_type = 'function' and f.pronamespace = 'outbox'::regnamespace
                             and f.proname = p.name
         where g.role_name <> schema_owner
           and case p.object_type when 'schema' then true when 'function' then f.oid is not null
                                  else to_regclass(format('outbox.%I', p.name)) is not null end
    loop
        execute format('grant %s on %s %s to %I', item.privilege, item.object_type, item.name, item.role_name);
    end loop;
end
$grants$;

-- The settings of a relay's session, for relays behind a pooler, which can set nothing themselves: the defaults of a
-- role that is a relay's alone. A timeout that was set by hand is kept.
do $settings$
declare
    wanted constant text[] := array[
        ['TimeZone', 'UTC'], ['DateStyle', 'ISO'], ['IntervalStyle', 'postgres'], ['client_encoding', 'UTF8'],
        ['bytea_output', 'hex'], ['array_nulls', 'on'], ['standard_conforming_strings', 'on'],
        ['extra_float_digits', '1'], ['search_path', 'pg_catalog'], ['row_security', 'off'],
        ['default_transaction_isolation', 'read committed'], ['default_transaction_read_only', 'off'],
        ['default_transaction_deferrable', 'off'],
        ['statement_timeout', '9s'], ['lock_timeout', '5s'], ['idle_in_transaction_session_timeout', '10s'],
        ['idle_session_timeout', '0'], ['transaction_timeout', '0'],
        ['jit', 'off'], ['plan_cache_mode', 'auto'], ['enable_seqscan', 'on'], ['enable_indexscan', 'on'],
        ['enable_indexonlyscan', 'on'], ['enable_bitmapscan', 'on'], ['enable_sort', 'on'], ['enable_nestloop', 'on'],
        ['enable_hashjoin', 'on'], ['enable_mergejoin', 'on'],
        ['restrict_nonsystem_relation_kind', ''], ['session_replication_role', 'origin']
    ];
    bounds constant text[] := '{statement_timeout, lock_timeout, idle_in_transaction_session_timeout}';
    relay record;
    missing record;
begin
    for relay in
        select g.role_name, r.oid from outbox.grantee g join pg_roles r on r.rolname = g.role_name
         where g.kind = 'relay' and not r.rolsuper and g.role_name <> current_user
           and not exists (select from outbox.grantee o where o.role_name = g.role_name and o.kind <> 'relay')
         order by 1
    loop
        select array_agg(array[w.name, w.value]) as settings, string_agg(w.name || ' = ' || quote_literal(w.value), ', ')
                   as shown,
               string_agg(w.name || ' = ' || quote_literal(h.value), ', ') filter (where h.value <> w.value) as before
          into missing
          from (select wanted[n][1] as name, wanted[n][2] as value from generate_subscripts(wanted, 1) n) w
          join pg_settings known on known.name = w.name
          left join lateral (
            select substr(c, length(w.name) + 2) as value, s.setrole <> 0 as is_roles,
                   s.setrole <> 0 and s.setdatabase <> 0 as is_ours
              from pg_db_role_setting s cross join unnest(s.setconfig) c
             where s.setrole in (0, relay.oid)
               and s.setdatabase in (0, (select d.oid from pg_database d where d.datname = current_database()))
               and starts_with(lower(c), lower(w.name) || '=')
             order by s.setrole <> 0 and s.setdatabase <> 0 desc, s.setrole <> 0 desc, s.setdatabase <> 0 desc
             limit 1
          ) h on true
         where not coalesce(h.is_ours and h.value = w.value or h.is_roles and w.name = any (bounds), false)
           -- Only superusers may set it, so it is set only if another value is stored.
           and (w.name <> 'session_replication_role' or h.value <> w.value);
        continue when missing.settings is null;
        begin
            for n in 1..array_length(missing.settings, 1) loop
                execute format('alter role %I in database %I set %s = %L', relay.role_name, current_database(),
                               missing.settings[n][1], missing.settings[n][2]);
            end loop;
            if missing.before is not null then
                raise notice 'set for role "%" in this database, where something else stood before (%): %',
                    relay.role_name, missing.before, missing.shown;
            end if;
        exception when insufficient_privilege then
            raise notice 'no right to set defaults of role "%" in this database: let an administrator set them: %',
                relay.role_name, missing.shown;
        end;
    end loop;
end
$settings$;

-- A relay compares the identity of its server with the one that the schema knows. PUBLIC may have lost the right to ask.
do $control$
declare
    relay name;
    statement text;
begin
    for relay in
        select g.role_name from outbox.grantee g
         where g.kind = 'relay' and not has_function_privilege(g.role_name, 'pg_catalog.pg_control_system()', 'execute')
         order by 1
    loop
        statement := format('grant execute on function pg_catalog.pg_control_system() to %I', relay);
        begin
            execute statement;
        exception when insufficient_privilege then null;
        end;
        if not has_function_privilege(relay, 'pg_catalog.pg_control_system()', 'execute') then
            raise notice 'role "%" may not call pg_control_system(), which a relay needs: let an administrator run: %',
                relay, statement;
        end if;
    end loop;
end
$control$;
