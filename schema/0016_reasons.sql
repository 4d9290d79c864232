-- The reasons that people give for a pass of the retention and for a rebase are recorded in the audit. The values of a first
-- file wait for a day if they would empty days at once. A replay keeps a day since its start.

-- ---------------------------------------------------------------------------------------------------------
-- Retention
-- ---------------------------------------------------------------------------------------------------------

alter table outbox.retention add column reason text;
comment on column outbox.retention.reason is 'Why a person began the newest pass, for the audit; null for a relay.';

-- True if the log may hold events that are past one of the numbers of days that `asked` lowers. Its first event counts.
create function outbox.is_past(asked jsonb, kept jsonb) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select coalesce((select e.created_at from outbox.event e order by e.id limit 1)
                    < clock_timestamp() - make_interval(days => min(n.days)), false)
      from (
        select (asked ->> f.name)::integer as days
          from unnest('{keep_days, keep_uids_days, keep_dead_days, keep_attempts_days}'::text[]) f (name)
         where outbox.asks_less(jsonb_build_object(f.name, asked -> f.name), jsonb_build_object(f.name, kept -> f.name))
      ) n
$$;

drop function outbox.begin_retention(uuid, text, double precision, boolean, boolean);
drop function outbox.weigh_retention(boolean, text);

-- As in version 6, except for the first files of a new database: lower values of theirs count at once only while the log
-- has no event that is past them. `by_reason` is recorded with lower values.
create function outbox.weigh_retention(at_once boolean, by_actor text, by_reason text) returns outbox.retention
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    t outbox.retention := (select r from outbox.retention r);
    w record;
    asked jsonb;
    since timestamptz;
    less boolean;
begin
    select coalesce(bool_or(f.stated), false) as stated,
           case when bool_or(f.days = 0) then 0 else max(f.days) end as days,
           case when bool_or(f.uids = 0) then 0 else max(f.uids) end as uids,
           case when bool_or(f.dead = 0) then 0 else max(f.dead) end as dead,
           case when bool_or(f.attempts = 0) then 0 else max(f.attempts) end as attempts,
           coalesce(bool_or(f.archive), false) as archive
      into w
      from (
        select r.retention is not null as stated,
               coalesce((r.retention ->> 'keep_days')::integer, nullif(t.unset_days, 0)) as days,
               coalesce((r.retention ->> 'keep_uids_days')::integer, nullif(t.unset_days, 0)) as uids,
               (r.retention ->> 'keep_dead_days')::integer as dead,
               coalesce((r.retention ->> 'keep_attempts_days')::integer, 14) as attempts,
               (r.retention ->> 'archive')::boolean as archive
          from outbox.relay r
         where r.seen_at > clock_timestamp() - interval '10 minutes'
      ) f;
    if not w.stated then
        update outbox.retention r set lower_since = null, lower_asked = null returning r.* into t;
        return t;
    end if;
    w.dead := coalesce(w.dead, 0);
    asked := jsonb_build_object('keep_days', w.days, 'keep_uids_days', w.uids, 'keep_dead_days', w.dead,
                                'keep_attempts_days', w.attempts, 'archive', w.archive);
    since := case when t.clock_mark > clock_timestamp() - interval '1 hour' and not outbox.asks_less(asked, t.lower_asked)
                  then t.lower_since end;
    less := outbox.asks_less(asked, to_jsonb(t));
    if not less or at_once or (not t.stated and t.unset_days > 0 and not outbox.is_past(asked, to_jsonb(t)))
       or since < clock_timestamp() - interval '1 day' then
        if less then
            perform outbox.record_action('retention policy', null, asked, 1, outbox.short_text(by_actor, 255), by_reason);
        end if;
        update outbox.retention r
           set stated = true, keep_days = w.days, keep_uids_days = w.uids, keep_dead_days = w.dead,
               keep_attempts_days = w.attempts, archive = w.archive, lower_since = null, lower_asked = null;
    else
        update outbox.retention r
           set keep_days = outbox.more_days(r.keep_days, w.days),
               keep_uids_days = outbox.more_days(r.keep_uids_days, w.uids),
               keep_dead_days = outbox.more_days(r.keep_dead_days, w.dead),
               keep_attempts_days = outbox.more_days(r.keep_attempts_days, w.attempts),
               archive = r.archive or w.archive,
               lower_since = coalesce(since, clock_timestamp()), lower_asked = asked;
    end if;
    return (select r from outbox.retention r);
end
$$;

-- As in version 6. `by_reason` is what a person gives as the reason, which is recorded for each day that the pass empties.
create function outbox.begin_retention(
    owner_id uuid, by_actor text, lease_for double precision, at_once boolean default false, works boolean default true,
    by_reason text default null,
    out lease bigint, out keep_days integer, out keep_uids_days integer, out keep_dead_days integer,
    out archive boolean, out hold_until timestamptz
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    here constant timestamptz := clock_timestamp();
    t outbox.retention;
    said constant text := nullif(trim(by_reason), '');
begin
    if owner_id is null then
        raise exception using errcode = 'invalid_parameter_value', message = 'owner_id must be a uuid, not null';
    end if;
    if at_once and not outbox.acts_as('operate') then
        raise exception 'at_once needs the right to operate: role "%" does not have it', outbox.emitter()
            using errcode = 'insufficient_privilege', hint = 'outbox-relay migrate --grant-operate ROLE gives it.';
    end if;
    if octet_length(said) > 2000 then
        raise exception using errcode = 'invalid_parameter_value', message = 'reason must have at most 2000 bytes';
    end if;
    select * into t from outbox.retention for update skip locked;
    -- A lease of more than an hour was given by a clock that has come back since.
    if not found or (t.owner <> owner_id and t.lease_until > here and t.lease_until < here + interval '1 hour') then
        return;
    end if;
    t := outbox.weigh_retention(at_once, by_actor, said);
    perform outbox.mark_clock();
    update outbox.retention r
       set epoch = r.epoch + 1, owner = owner_id,
           lease = ('x' || right(replace(gen_random_uuid()::text, '-', ''), 15))::bit(60)::bigint,
           actor = outbox.short_text(by_actor, 255), reason = said,
           worked_at = case when works then here else coalesce(r.worked_at, '-infinity') end,
           lease_until = here + outbox.lease_interval(lease_for)
    returning r.* into t;
    lease := t.lease;
    keep_days := t.keep_days;
    keep_uids_days := t.keep_uids_days;
    keep_dead_days := t.keep_dead_days;
    archive := t.archive;
    hold_until := t.hold_until;
end
$$;

-- As in version 6, and the reason of the pass is recorded.
create or replace function outbox.empty_day(day date, lease bigint, events bigint) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
#variable_conflict use_variable
declare
    most constant integer := 1000;
    config_now bigint;
    due record;
    c outbox.day;
    size bigint;
    began timestamptz;
    removed bigint;
begin
    perform outbox.require_read_committed('outbox.empty_day');
    if transaction_timestamp() <> statement_timestamp() then
        raise exception 'outbox.empty_day must be a transaction of its own, which ends at once'
            using errcode = 'invalid_transaction_state';
    end if;
    perform outbox.require_day(day), outbox.at_home();
    perform outbox.renew_retention(lease);
    select * into c from outbox.day d where d.day = empty_day.day and d.emptied_at is null for update;
    if c.deleted_at is not null then
        -- Not looked for again: the entries of deleted events may still be in the index.
        select 'outbox.event_default'::regclass as part into due
          from outbox.retention r
         where r.keep_days > 0 and c.checked_before <= clock_timestamp() - make_interval(days => r.keep_days);
    else
        select d.part into due from outbox.past_days(empty_day.day) d;
    end if;
    if due is null or c.checked_snapshot is null or c.checked_on <> outbox.incarnation()
       or (select r.hold_until > clock_timestamp() from outbox.retention r) then
        return 'again';
    end if;
    if (select r.archive from outbox.retention r)
       and (c.archived_to is null or c.archived_on <> outbox.incarnation() or c.archived_before < c.checked_before) then
        return 'archive';
    end if;
    begin
        select m.config into config_now from outbox.meta m for share nowait;
    exception when lock_not_available then
        return 'locked';
    end;
    if config_now <> c.checked_config then
        return 'again';
    end if;
    perform set_config('synchronous_commit', 'local', true);
    if day = '-infinity' then
        with past as materialized (
            select o.ctid as place, o.created_at, o.id from outbox.event_default o
             where o.created_at < c.checked_before
               and (o.created_at, o.id - 0) > (coalesce(c.deleted_at, '-infinity'), coalesce(c.deleted_id, -9223372036854775808))
               and (o.id <= (select m.floor from outbox.meta m) or pg_visible_in_snapshot(o.xid, c.checked_snapshot))
             order by o.created_at, o.id - 0
             limit most
        ),
        gone as (
            delete from outbox.event_default e where e.ctid = any (array(select p.place from past p))
        )
        select count(*), (array_agg(p.created_at order by p.created_at desc, p.id desc))[1],
               (array_agg(p.id order by p.created_at desc, p.id desc))[1]
          into removed, c.deleted_at, c.deleted_id
          from past p;
        if removed = most then
            update outbox.day d set deleted_at = c.deleted_at, deleted_id = c.deleted_id
             where d.day = empty_day.day and d.emptied_at is null;
            perform outbox.record_action('retention', null, '{"day": "default"}', removed,
                                         (select r.actor from outbox.retention r), (select r.reason from outbox.retention r));
            return 'more';
        end if;
    else
        size := pg_total_relation_size(due.part);
        -- Once before, so that under the lock every page is in memory.
        perform outbox.came_since(due.part, c.checked_snapshot), outbox.came_since(due.part, c.archived_snapshot);
        begin
            execute format('lock table %s in access exclusive mode', due.part);
        exception when lock_not_available then
            update outbox.day d
               set kept_by = outbox.kept_since(outbox.day_holders(due.part, array[
                       'AccessShareLock', 'RowShareLock', 'RowExclusiveLock', 'ShareUpdateExclusiveLock', 'ShareLock',
                       'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock']), c.kept_by)
             where d.day = empty_day.day and d.emptied_at is null;
            return 'locked';
        end;
        began := clock_timestamp();
        if outbox.came_since(due.part, c.checked_snapshot)
           or (c.archived_snapshot is not null and outbox.came_since(due.part, c.archived_snapshot)) then
            return 'again';
        end if;
        if clock_timestamp() - began > interval '100 ms' then
            return 'locked';
        end if;
        execute format('truncate table only %s', due.part);
    end if;
    update outbox.day d
       set emptied_at = clock_timestamp(), events = coalesce(d.events, greatest(empty_day.events, 0)), bytes = size,
           kept_by = '[]', left_because = null, left_at = null,
           checked_snapshot = null, archived_snapshot = null, deleted_at = null, deleted_id = null
     where d.day = empty_day.day and d.emptied_at is null;
    perform outbox.record_action('retention', null, jsonb_build_object('day', replace(day::text, '-infinity', 'default')),
                                 coalesce(removed, c.events, greatest(events, 0), 0),
                                 (select r.actor from outbox.retention r), (select r.reason from outbox.retention r));
    return 'emptied';
end
$$;

-- The live relays whose files ask for the most days of events, which decides keep_days, by name; none if keep_days is
-- from an earlier time or the default of the database. At most 20.
create function outbox.keep_days_of() returns text[]
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select array(
        select w.name
          from (select r.name, coalesce((r.retention ->> 'keep_days')::integer, nullif(t.unset_days, 0)) as days, t.keep_days
                  from outbox.relay r cross join outbox.retention t
                 where r.seen_at > clock_timestamp() - interval '10 minutes') w
         where w.days = w.keep_days
         order by w.name limit 20)
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Replays that keep days
-- ---------------------------------------------------------------------------------------------------------

-- As in version 8, with the time since which a replay keeps the partition: its start.
create or replace function outbox.replay_keepers(part regclass, before timestamptz) returns jsonb
language plpgsql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
declare
    kept jsonb := '[]';
    r record;
    there boolean;
begin
    for r in
        select p.id, p.state, p.since, p.until, p.ids, p.upto_id, p.created_at,
               (select min(l.last_id)
                  from (select max(u.last_id) as last_id
                          from outbox.replay_progress g cross join lateral unnest(g.shards, g.last_ids) u (shard, last_id)
                         where g.replay = p.id group by u.shard) l) as last_id,
               case when p.counted_upto < p.upto_id then p.counted_upto end as counted_upto
          from outbox.replay p where p.state in ('running', 'paused') order by p.id
    loop
        execute format(
            'select exists (select from %s e where e.id > $1 and e.id <= $2 and e.created_at < $3 '
            '   and ($4 is null or e.created_at >= $4) and ($5 is null or e.created_at < $5) '
            '   and ($6 is null or e.id = any ($6)))', part)
           into there using least(r.last_id, r.counted_upto), r.upto_id, before, r.since, r.until, r.ids;
        if there then
            kept := kept || jsonb_build_object('kind', 'replay', 'name', r.id::text, 'paused', r.state = 'paused',
                                               'since', date_trunc('second', r.created_at));
        end if;
    end loop;
    return kept;
end
$$;

-- As in version 6. A member that has this time already keeps it.
create or replace function outbox.kept_since(kept jsonb, earlier jsonb) returns jsonb
language sql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
    select coalesce(jsonb_agg(
               n.one || jsonb_build_object('since', coalesce(
                   n.one -> 'since',
                   (select o.one -> 'since' from jsonb_array_elements(earlier) o (one)
                     where o.one -> 'kind' = n.one -> 'kind' and o.one -> 'name' = n.one -> 'name' limit 1),
                   to_jsonb(date_trunc('second', clock_timestamp()))))
               order by n.place), '[]')
      from jsonb_array_elements(kept) with ordinality n (one, place)
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Rebase
-- ---------------------------------------------------------------------------------------------------------

drop function outbox.rebase();

-- As in version 6, and the audit has who ran it, as the caller says, and why.
create function outbox.rebase(actor text default null, reason text default null) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    alive text;
    here constant bigint := (select c.system_identifier from pg_control_system() c);
    given_out bigint;
    highest bigint;
    new_floor bigint;
    oldest bigint;
    outranked bigint;
    fence bigint;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'outbox.rebase must see what is committed before it has its locks'
            using errcode = 'invalid_transaction_state', hint = 'Run it in a transaction that is READ COMMITTED.';
    end if;
    select string_agg(format('%s (seen %s s ago)', r.name, round(extract(epoch from clock_timestamp() - r.seen_at))),
                      ', ' order by r.name)
      into alive
      from (select * from outbox.relay where seen_at > clock_timestamp() - interval '30 seconds' limit 20) r;
    if alive is not null then
        raise exception using errcode = 'object_in_use',
            message = format('relays are running: %s; stop every relay first', alive),
            hint = 'A relay that crashed counts as running for 30 seconds.';
    end if;
    lock table outbox.event, outbox.sink, outbox.shard, outbox.progress, outbox.delivery in access exclusive mode;
    given_out := coalesce(pg_sequence_last_value('outbox.event_id_seq'), 0);
    highest := greatest(
        given_out,
        (select max(e.id) from outbox.event e),
        (select max(d.id) from outbox.delivery d),
        (select max(m.id) from outbox.discarded m),
        (select max(greatest(p.a_seq, p.b_seq, p.last_id)) from outbox.progress p),
        (select m.floor from outbox.meta m)
    );
    new_floor := highest;
    if given_out < highest or (
        here is distinct from (select m.system_identifier from outbox.meta m)
        and exists (select from outbox.event e group by e.id having count(*) > 1)
    ) then
        new_floor := highest + outbox.renumber(given_out, highest);
    end if;
    perform setval('outbox.event_id_seq', greatest(new_floor, 1), new_floor > 0);
    oldest := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
    outranked := coalesce((select max(p.seq) from outbox.progress p), 0);
    perform setval(q.name, greatest(outranked, 1))
       from (select pg_get_serial_sequence('outbox.progress', 'seq') as name) q
      where outranked >= nextval(q.name);
    fence := outbox.raise_config() << 32;
    update outbox.shard s set epoch = greatest(s.epoch + 1, fence), owner = null, lease_until = clock_timestamp();
    delete from outbox.sink_pass;
    delete from outbox.late_position;
    delete from outbox.row_ahead;
    insert into outbox.shard (sink, shard, epoch)
    select k.name, n, fence from outbox.sink k cross join generate_series(0, 63) n
        on conflict do nothing;
    insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id)
    select k.name, u.shards, e.epochs, u.upto_id, '3:3:', 3,
           new_floor, '9223372036854775807:9223372036854775807:', oldest, 0
      from outbox.sink k
     cross join lateral outbox.settled_upto(k.name) u
     cross join lateral (
        select array_agg(s.epoch order by s.shard) as epochs from outbox.shard s
         where s.sink = k.name and s.shard = any (u.shards)
     ) e;
    delete from outbox.progress p where p.seq <= outranked;
    update outbox.day
       set checked_snapshot = null, archived_to = null, sha256 = null, events = null, archived_snapshot = null,
           archived_before = null, archived_on = null
     where emptied_at is null;
    update outbox.meta m
       set floor = new_floor, floor_xid = oldest, system_identifier = here,
           min_relay = case when exists (select from outbox.discarded) then greatest(m.min_relay, 3) else m.min_relay end;
    perform outbox.record_action('rebase', null, jsonb_build_object('floor', new_floor), 1, actor,
                                  nullif(trim(reason), ''));
    return new_floor;
end
$$;
