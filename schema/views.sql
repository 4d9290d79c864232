-- The position of each shard. As in version 1, from the start of the ledger of its sink. With OFFSET, so that no plan reads the
-- ledger before it knows where that starts.
create or replace view outbox.standing as
select distinct on (k.name, u.shard)
       k.name as sink, u.shard, u.epoch, p.seq, p.a_seq, p.a_snapshot, p.a_next, p.b_seq, p.b_snapshot, p.b_next, p.last_id
  from outbox.sink k
 cross join lateral (select g.* from outbox.progress g where g.sink = k.name and g.seq >= k.ledger_start offset 0) p
 cross join lateral unnest(p.shards, p.epochs) u (shard, epoch)
 order by k.name, u.shard, u.epoch desc, p.seq desc;

-- The privileges of roles. A function, table or sequence that is not listed here belongs to the owner alone. Functions
-- of kind `owner` are called by the owner alone: a test compares this list with the schema.
--
-- Who acts or may see payloads may look at all that kind `read` lists, where payloads and headers are left out.
create or replace view outbox.privilege (kind, object_type, name, columns, privilege) as
select k.kind, l.object_type, n.name, l.columns, l.privilege
  from (values
    ('emit', 'schema', '{outbox}'::text[], null::text[], 'USAGE'),
    ('emit', 'function', '{cancel, emit, emit_raw, emitted, event_index, lock_unique_keys, reschedule}', null, 'EXECUTE'),

    ('consume', 'schema', '{outbox}', null, 'USAGE'),
    ('consume', 'function', '{once}', null, 'EXECUTE'),

    ('relay', 'schema', '{outbox, outbox_internal}', null, 'USAGE'),
    ('relay', 'function', '{arm, backlog, claim_rows, give_rows_back, held_keys, keys_with_rows, known_down, look_small, '
                           'make_partitions, only_at, payload_ceiling, positions, raise_ledger_starts, read_late, '
                           'read_rest, read_small, register_sinks, renew_shards, rows_standing, settle, tick, trim_progress}', null, 'EXECUTE'),
    -- Called by functions of the line above, with the rights of their caller.
    ('relay', 'function', '{at_home, delivery_fault, elsewhere, first_dead, home, incarnation, lease_term, leased_shards, unsettled}', null, 'EXECUTE'),
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
    -- Schedules, figures and history are written by statements of the relay.
    ('relay', 'table', '{schedule, figures, history}', null, 'SELECT'),
    ('relay', 'table', '{schedule, figures, history}', null, 'INSERT'),
    ('relay', 'table', '{schedule, figures, history}', null, 'UPDATE'),
    ('relay', 'table', '{history}', null, 'DELETE'),
    ('relay', 'table', '{relay}', '{retention, schedules}', 'UPDATE'),
    ('relay', 'sequence', '{schedule_generation}', null, 'USAGE'),
    ('operate', 'table', '{relay}', '{config, schedules}', 'SELECT'),
    ('relay', 'sequence', '{event_id_seq, server_mark}', null, 'SELECT'),
    ('relay', 'table', '{sink}', '{circuit, circuit_since, in_flight_limit, last_error, last_error_at, paused, '
                                 'paused_reason}', 'UPDATE'),
    ('relay', 'table', '{shard}', '{owner, epoch, lease_until, crashes, generation}', 'UPDATE'),
    ('relay', 'table', '{progress, delivery}', null, 'INSERT'),
    ('relay', 'table', '{delivery}', '{state, ready, due_at, attempts, claims, suspect, lease, lease_until, owner, last_error, '
                                     'last_status, last_attempt_at, last_attempt}', 'UPDATE'),
    ('relay', 'table', '{relay}', '{id, name, version, sinks, started_at, seen_at, config}', 'INSERT'),
    ('relay', 'table', '{relay}', '{id, name, version, sinks, started_at, seen_at, config}', 'UPDATE'),
    ('relay', 'table', '{progress, delivery, relay}', null, 'DELETE'),
    ('relay', 'function', '{attempts_of, last_attempt_of, make_attempt_partitions, record_attempts}', null, 'EXECUTE'),
    ('relay', 'table', '{attempt}', null, 'SELECT'),

    ('relay', 'function', '{as_time, count_deliveries, deliveries, delivery_state, delivery_summary, find_deliveries, '
                          'loadable_time, past_time, position_passed, probe_sink, set_paused}', null, 'EXECUTE'),
    ('relay', 'table', '{audit, discarded}', null, 'SELECT'),
    ('relay', 'table', '{secret}', '{config_key, page_key}', 'SELECT'),

    ('read', 'schema', '{outbox, outbox_internal}', null, 'USAGE'),
    ('read', 'function', '{as_time, backlog, count_deliveries, deliveries, delivery_state, delivery_summary, find_deliveries, '
                         'loadable_time, past_time, position_passed}', null, 'EXECUTE'),
    ('read', 'table', '{secret}', '{page_key}', 'SELECT'),
    ('read', 'table', '{audit, discarded, meta, progress, shard, sink, standing}', null, 'SELECT'),
    -- `config` is for those who operate; outbox.retention_status shows `retention`.
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

    ('owner', 'function', '{discard_rows, hashed_filter, is_meant, keyed_hash, lock_shards_of, is_of_tenant, '
                           'next_deliveries, read_filter, record_action, require_read_committed, require_sink, row_died, '
                           'short_text, sink_paused, was_before}', null, 'EXECUTE'),

    -- Sinks and configurations.
    ('relay', 'function', '{list_sinks}', null, 'EXECUTE'),
    ('relay', 'table', '{former_sink}', null, 'SELECT'),
    ('read', 'function', '{list_sinks}', null, 'EXECUTE'),
    ('read', 'table', '{former_sink}', null, 'SELECT'),
    ('operate', 'table', '{secret}', '{config_key}', 'SELECT'),
    ('operate', 'function', '{action_tick, drop_sink, preview_removal, preview_seek, rename_sink, seek_sink}',
     null, 'EXECUTE'),
    ('owner', 'function', '{error_kind, shown_detail, was_counted}', null, 'EXECUTE'),
    ('owner', 'function', '{delete_rows, end_when_idle}', null, 'EXECUTE'),
    ('owner', 'function', '{check_action_tick, check_sink_name, count_seek, first_id_since, move_rows, relays_of, '
                           'seek_place, types_of}',
     null, 'EXECUTE'),

    -- Replays.
    ('relay', 'function', '{read_replayed, replay_of, replays, settle_replayed, sink_of, spend_replay, tend_replay, '
                           'trim_replay_exceptions}', null, 'EXECUTE'),
    ('relay', 'table', '{replay, replay_progress}', null, 'SELECT'),
    ('read', 'function', '{replays}', null, 'EXECUTE'),
    ('operate', 'function', '{preview_replay, set_replay, start_replay}', null, 'EXECUTE'),
    ('owner', 'function', '{adopt_rebase, at_its_end, clear_replay, count_matches, drop_replay_rows, follow_rename, '
                           'id_behind, move_dead, place_replay, plan_replay, replay_delivered, replay_keepers, '
                           'replay_means, replay_outcome, replay_outcomes, replay_passed_by, replay_places, replay_rows, '
                           'replay_shards, require_days, trim_replay}', null, 'EXECUTE'),

    -- Retention: done by relays, and by roles that operate; roles that read see the days.
    ('relay', 'function', '{begin_archive, begin_retention, check_day, count_day, discard_expired, drop_day, due_days, '
                           'empty_day, end_retention, leave_day, read_day_events, record_archive, renew_retention, '
                           'retention_status, trim_attempts, trim_inbox, trim_uids, unfinished_archives}', null, 'EXECUTE'),
    ('operate', 'schema', '{outbox, outbox_internal}', null, 'USAGE'),
    ('operate', 'table', '{meta}', null, 'SELECT'),
    ('operate', 'function', '{begin_retention, check_day, count_day, discard_expired, drop_day, due_days, empty_day, '
                            'end_retention, leave_day, renew_retention, retention_status, trim_attempts, trim_inbox, trim_uids}',
     null, 'EXECUTE'),
    ('read', 'schema', '{outbox, outbox_internal}', null, 'USAGE'),
    ('read', 'table', '{meta}', null, 'SELECT'),
    ('read', 'function', '{retention_status}', null, 'EXECUTE'),
    -- A role that cannot read a day cannot record that an archive has it.
    ('payloads', 'function', '{begin_archive, read_day_events, record_archive, unfinished_archives}', null, 'EXECUTE'),
    ('relay', 'function', '{keep_days_of}', null, 'EXECUTE'),
    ('read', 'function', '{keep_days_of}', null, 'EXECUTE'),
    ('owner', 'function', '{asks_less, came_since, checked_day, day_holders, retention_blockers, died_before, '
                           'blocker_names, kept_since, mark_clock, part_of, partitions, past_days, evaluate_retention}', null, 'EXECUTE'),

    -- Why.
    ('relay', 'function', '{trim_discarded, trim_routes, why}', null, 'EXECUTE'),
    ('read', 'function', '{event_states, why}', null, 'EXECUTE'),
    ('owner', 'function', '{event_routing, in_seconds, record_routes, routed_states, type_matches}', null, 'EXECUTE'),
    -- Erase.
    ('operate', 'function', '{erase}', null, 'EXECUTE'),
    -- Called by functions that read the log, with the rights of their caller.
    ('relay', 'function', '{is_erased}', null, 'EXECUTE'),
    ('owner', 'function', '{archives_of_subject, with_archive, change_events, check_erasable, content_columns, '
                           'content_statistics, erase_in_audit, erase_in_sinks, fill_shard, keep_no_statistics, look_again, '
                           'next_of_subject, open_erasure, read_subject, renew_key_statistics, shard_of, undelivered, '
                           'undelivered_of_subject}', null, 'EXECUTE'),

    -- Figures and history.
    ('relay', 'function', '{figures_of_rows, figures_of_sinks}', null,
     'EXECUTE'),
    ('read', 'function', '{figures_of_rows}', null, 'EXECUTE'),
    ('read', 'table', '{figures}', '{owner, lease_until, at, figures}', 'SELECT'),
    ('read', 'table', '{history}', null, 'SELECT'),
    ('owner', 'function', '{move_history}', null, 'EXECUTE'),
    -- Schedules.
    ('relay', 'function', '{fire_schedule_times}', null, 'EXECUTE'),
    ('read', 'table', '{schedule}', '{name, cron, timezone, type, key, missed, generation, after_at, next_at, last_at, paused, '
                                    'retry_at, error, error_at, tenant}', 'SELECT'),
    ('payloads', 'table', '{schedule}', '{payload, headers}', 'SELECT'),
    ('operate', 'function', '{run_schedule, set_schedule}', null, 'EXECUTE'),
    ('owner', 'function', '{emit_schedule, require_schedule}', null, 'EXECUTE'),
    -- Limits across relays.
    ('relay', 'table', '{sink}', '{rate_per_second, max_in_flight_total, spread_seconds}', 'UPDATE'),
    ('relay', 'function', '{spread_of}', null, 'EXECUTE'),
    ('owner', 'function', '{spread_scheduled}', null, 'EXECUTE'),
    -- Notices.
    ('relay', 'function', '{notify_sinks}', null, 'EXECUTE'),
    ('owner', 'function', '{error_class, make_notice, notice_due, notify_dead, notify_sink, notify_state, sink_lag}', null, 'EXECUTE'),

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
