-- Begin a pass: claim the lease for `lease_for` seconds, evaluate the policy, move the clock's mark. `lease` is null while
-- another process has it; each step of the pass names it. One that asks `at_once` lets a lower policy count from now on: a role
-- that was granted `operate` may, and the owner. One without `works` does no steps: that of a relay with enabled = false.
-- `by_reason` is what a person gives as the reason, which is recorded for each day that the pass empties.
--
-- After a step of the clock of more than a day, ahead of its mark or without any relay, nothing is emptied for as long as the
-- step was, at most for keep_days: then no event is emptied that has not been kept for keep_days of time that passed. Before the
-- first pass, the newest event is the mark. A clock that comes back ends the wait.
create or replace function outbox_internal.begin_retention(
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
    keep interval;
    mark timestamptz;
    until timestamptz;
begin
    if owner_id is null then
        raise exception using errcode = 'invalid_parameter_value', message = 'owner_id must be a uuid, not null';
    end if;
    if at_once and not exists (
            select from pg_roles r
             where (r.rolname in (select g.role_name from outbox.grantee g where g.kind = 'operate')
                    or r.oid = (select n.nspowner from pg_namespace n where n.nspname = 'outbox'))
               and pg_has_role(outbox_internal.emitter()::name, r.oid, 'usage')) then
        raise exception 'at_once needs the right to operate: role "%" does not have it', outbox_internal.emitter()
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
    t := outbox_internal.evaluate_retention(at_once, by_actor, said);
    keep := make_interval(days => t.keep_days);
    mark := coalesce(t.clock_mark, greatest(least((select e.created_at from outbox.event e order by e.id desc limit 1), here),
                                            here - keep - interval '2 days'));
    until := case when here - mark > interval '1 day' then greatest(t.hold_until, here + least(here - mark, keep))
                  when t.hold_until <= here + keep then t.hold_until end;
    update outbox.retention r
       set clock_mark = here, hold_until = case when until > here then until end,
           epoch = r.epoch + 1, owner = owner_id,
           lease = ('x' || right(replace(gen_random_uuid()::text, '-', ''), 15))::bit(60)::bigint,
           actor = outbox_internal.short_text(by_actor, 255), reason = said,
           worked_at = case when works then here else coalesce(r.worked_at, '-infinity') end,
           lease_until = here + least(greatest(coalesce(lease_for, 60), 1), 600) * interval '1 second'
    returning r.* into t;
    lease := t.lease;
    keep_days := t.keep_days;
    keep_uids_days := t.keep_uids_days;
    keep_dead_days := t.keep_dead_days;
    archive := t.archive;
    hold_until := t.hold_until;
end
$$;

-- Renew the lease for `lease_for` seconds, or refuse: another process has claimed it since. It stays locked until the end
-- of the transaction.
create or replace function outbox_internal.renew_retention(lease bigint, lease_for double precision default 60) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    update outbox.retention r
       set lease_until = clock_timestamp() + least(greatest(coalesce(lease_for, 60), 1), 600) * interval '1 second'
     where r.lease = renew_retention.lease and r.owner is not null;
    if not found then
        raise exception 'retention lease % was taken over', lease
            using errcode = 'object_not_in_prerequisite_state';
    end if;
end
$$;

-- Give the lease back.
create or replace function outbox_internal.end_retention(lease bigint) returns void
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    update outbox.retention r set owner = null, lease_until = null where r.lease = end_retention.lease
$$;

-- Recompute the policy from the files of the live relays. For each kind of days 0 (no limit) wins, else the largest. More
-- is kept at once. Less is kept when all live relays have asked for that much or less for a day without a break, or
-- `at_once`: a relay that is about to start again may have the larger value. An hour without any pass is a break. A file
-- without [retention] asks for 30 days. The first files count at once, lower values only while the log has no event that is past
-- them. A lower policy is recorded with `by_reason`.
create or replace function outbox_internal.evaluate_retention(at_once boolean, by_actor text, by_reason text) returns outbox.retention
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    t outbox.retention := (select r from outbox.retention r);
    w record;
    asked jsonb;
    since timestamptz;
    less boolean;
    at_first boolean := false;
    lowered integer;
    lowered_uids integer;
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
               coalesce((r.retention ->> 'keep_days')::integer, 30) as days,
               coalesce((r.retention ->> 'keep_uids_days')::integer, 30) as uids,
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
    since := case when t.clock_mark > clock_timestamp() - interval '1 hour' and not outbox_internal.asks_less(asked, t.lower_asked)
                  then t.lower_since end;
    less := outbox_internal.asks_less(asked, to_jsonb(t));
    if less and not t.stated then
        select min((asked ->> n.name)::integer), min((asked ->> n.name)::integer) filter (where n.name = 'keep_uids_days')
          into lowered, lowered_uids
          from unnest('{keep_days, keep_uids_days, keep_dead_days, keep_attempts_days}'::text[]) n (name)
         where outbox_internal.asks_less(jsonb_build_object(n.name, asked -> n.name),
                                         jsonb_build_object(n.name, to_jsonb(t) -> n.name));
        -- The first event of the log counts, and every mark of the inbox.
        at_first := (coalesce((select e.created_at from outbox.event e order by e.id limit 1)
                              < clock_timestamp() - make_interval(days => lowered), false)
                     or exists (select from outbox.inbox i
                                 where i.handled_at < clock_timestamp() - make_interval(days => lowered_uids))) is false;
    end if;
    if not less or at_once or at_first
       or since < clock_timestamp() - interval '1 day' then
        if less then
            perform outbox_internal.record_action('retention policy', null, asked, 1, outbox_internal.short_text(by_actor, 255), by_reason);
        end if;
        update outbox.retention r
           set stated = true, keep_days = w.days, keep_uids_days = w.uids, keep_dead_days = w.dead,
               keep_attempts_days = w.attempts, archive = w.archive, lower_since = null, lower_asked = null;
    else
        update outbox.retention r
           set keep_days = case when 0 in (r.keep_days, w.days) then 0 else greatest(r.keep_days, w.days) end,
               keep_uids_days = case when 0 in (r.keep_uids_days, w.uids) then 0 else greatest(r.keep_uids_days, w.uids) end,
               keep_dead_days = case when 0 in (r.keep_dead_days, w.dead) then 0 else greatest(r.keep_dead_days, w.dead) end,
               keep_attempts_days = case when 0 in (r.keep_attempts_days, w.attempts) then 0 else greatest(r.keep_attempts_days, w.attempts) end,
               archive = r.archive or w.archive,
               lower_since = coalesce(since, clock_timestamp()), lower_asked = asked;
    end if;
    return (select r from outbox.retention r);
end
$$;

-- The policy, and each day that has events or was emptied (the newest 400 of those), as JSON. What keeps a day that is past
-- keep_days is as of the last pass, or as of now if `live`. `keep_days_of` are up to 20 live relays whose files ask for the
-- most days of events, which decides keep_days; none if that is from an earlier time or the default of the database. `idle`
-- says that no pass runs or has begun lately. `events` of a day that is not emptied is an estimate.
create or replace function outbox.retention_status(live boolean default false) returns jsonb
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
as $$
#variable_conflict use_column
declare
    t outbox.retention := (select r from outbox.retention r);
    worked constant timestamptz := case when t.worked_at = '-infinity' then null else least(t.clock_mark, t.worked_at) end;
    days jsonb;
begin
    with due as (select d.day, coalesce(d.before, 'infinity') as before from outbox_internal.past_days() d),
    known as (
        select p.day, c.part,
               case when x.relname is not null and c.archived_to is null
                    then greatest(x.reltuples, pg_stat_get_live_tuples(x.oid))::bigint else c.events end as events,
               pg_total_relation_size(x.oid) as bytes, c.archived_to, null::timestamptz as emptied_at,
               case when due.day is null then '[]'
                    when live then outbox_internal.kept_since(outbox_internal.retention_blockers(p.day, due.before), coalesce(c.kept_by, '[]'))
                    else coalesce(c.kept_by, '[]') end as kept_by,
               case when due.day is not null then c.left_because end as left_because,
               case when due.day is not null then c.left_at end as left_at,
               due.day is not null as due,
               case when due.day is not null and isfinite(p.upto)
                    then extract(epoch from clock_timestamp() - p.upto - make_interval(days => t.keep_days)) end as due_seconds
          from outbox_internal.partitions() p
          join pg_class x on x.oid = p.part
          left join outbox.day c on c.day = p.day and c.emptied_at is null
          left join due on due.day = p.day
         where pg_relation_size(p.part) > 0
        union all
        (select d.day, d.part, d.events, d.bytes, d.archived_to, d.emptied_at, '[]', null, null, false, null
           from outbox.day d where d.emptied_at is not null order by d.emptied_at desc limit 400)
    )
    select coalesce(jsonb_agg(jsonb_build_object(
               'day', case when k.day = '-infinity' then 'default' else k.day::text end,
               'events', k.events, 'bytes', k.bytes, 'archived', k.archived_to,
               'emptied', k.emptied_at, 'kept_by', k.kept_by, 'left_because', k.left_because, 'left_at', k.left_at,
               'due', k.due, 'due_seconds', k.due_seconds) order by k.day, k.emptied_at), '[]')
      into days from known k;
    return jsonb_build_object(
        'keep_days', t.keep_days,
        'keep_days_of', array(select w.name from outbox.relay w
                               where w.seen_at > clock_timestamp() - interval '10 minutes'
                                 and coalesce((w.retention ->> 'keep_days')::integer, 30) = t.keep_days
                               order by w.name limit 20),
        'keep_uids_days', t.keep_uids_days, 'keep_dead_days', t.keep_dead_days,
        'keep_attempts_days', t.keep_attempts_days, 'archive', t.archive, 'lower_since', t.lower_since,
        'last_pass', worked,
        'idle', coalesce(worked < clock_timestamp() - interval '15 minutes', true)
                and coalesce(t.lease_until < clock_timestamp(), true),
        'hold_until', case when t.hold_until > clock_timestamp() then t.hold_until end, 'days', days);
end
$$;
comment on function outbox.retention_status is
    'The retention policy and each day of the log as JSON, with what keeps a day that is past its time.';

-- The transactions that hold one of these locks of a partition, as retention_blockers has it; at most five.
create or replace function outbox_internal.day_holders(part regclass, modes text[]) returns jsonb
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select coalesce(jsonb_agg(jsonb_build_object('kind', 'transaction', 'name', h.name) order by h.name), '[]')
      from (
        select distinct case when l.pid is null then 'a prepared transaction'
                             else concat('process ', l.pid, ', role ' || a.usename, ', ' || nullif(a.application_name, ''))
                             end as name
          from pg_locks l
          left join pg_stat_activity a on a.pid = l.pid
         where l.locktype = 'relation' and l.relation = part and l.granted and l.mode = any (modes)
           and l.database = (select d.oid from pg_database d where d.datname = current_database())
           and l.pid is distinct from pg_backend_pid()
         order by 1 limit 5
      ) h
$$;

-- The reasons that keep a day, as a JSON array of objects with `kind` and `name`: sinks that have not settled an event
-- of it, with the number of shards that stand before one; replays that may still read one; transactions that may still
-- write into it. Of the DEFAULT partition, events from `before` on are left out. Rows of `delivery` keep nothing: they
-- have copies.
--
-- Each piece that a sink has left is looked for by an index: the latecomers of a tick by their transactions, the rest by
-- id. Expressions keep the planner from the index of ids for latecomers: where few transactions wrote a day, it takes that
-- one for smaller, and reads all of the day for each piece.
create or replace function outbox_internal.retention_blockers(day date, before timestamptz default 'infinity') returns jsonb
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_variable
declare
    part constant regclass := outbox_internal.part_of(day);
    kept jsonb := '[]';
    sink record;
    piece record;
    behind smallint[];
    there boolean;
begin
    for sink in select k.name, k.paused from outbox.sink k order by k.name loop
        behind := '{}';
        for piece in select * from outbox_internal.unsettled(sink.name) loop
            if piece.late then
                execute format(
                    'select exists (select from %1$s e where e.xid = any (array(select pg_snapshot_xip($1))) '
                    '        and e.id + 0 > $3 and e.id + 0 <= $4 and e.shard + 0 = any ($5) and e.created_at < $6) '
                    '    or exists (select from %1$s e where e.xid >= pg_snapshot_xmax($1) and e.xid < $2::text::xid8 '
                    '        and e.id + 0 > $3 and e.id + 0 <= $4 and e.shard + 0 = any ($5) and e.created_at < $6)', part)
                   into there using piece.a, piece.a_next, piece.after_id, piece.upto_id, piece.shards, before;
            else
                execute format(
                    'select exists (select from %1$s e where e.id > $2 and e.id <= $3 and e.shard = any ($4) '
                    '        and e.created_at < $5 and not pg_visible_in_snapshot(e.xid, $1))', part)
                   into there using piece.a, piece.after_id, piece.upto_id, piece.shards, before;
            end if;
            if there then
                behind := behind || piece.shards;
            end if;
        end loop;
        if cardinality(behind) > 0 then
            kept := kept || jsonb_build_object(
                'kind', 'sink', 'name', sink.name, 'paused', sink.paused,
                'shards', (select count(distinct s) from unnest(behind) s));
        end if;
    end loop;
    return kept || outbox_internal.replay_keepers(part, before) || outbox_internal.day_holders(part, array['RowExclusiveLock']);
end
$$;

-- The names in `kept`, by which a change is news: transactions come and go, and so do the shards of a sink.
create or replace function outbox_internal.blocker_names(kept jsonb) returns text[]
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
    select array(select distinct case when k ->> 'kind' = 'transaction' then 'a transaction'
                                      else concat(k ->> 'kind', ' ', k ->> 'name') end
                   from jsonb_array_elements(kept) k order by 1)
$$;

-- `kept` with the time since which each of its members has kept the day: its own, or that from `earlier`.
create or replace function outbox_internal.kept_since(kept jsonb, earlier jsonb) returns jsonb
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

-- True if one value of a policy keeps less than the same value of another, as JSON. Days of 0 mean no limit; a null in
-- place of a policy has no values.
create or replace function outbox_internal.asks_less(asked jsonb, other jsonb) returns boolean
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
    select coalesce(bool_or((asked ->> n.name)::integer > 0
                            and ((other ->> n.name)::integer = 0
                                 or (asked ->> n.name)::integer < (other ->> n.name)::integer)), false)
           or coalesce((other ->> 'archive')::boolean and not (asked ->> 'archive')::boolean, false)
      from unnest('{keep_days, keep_uids_days, keep_dead_days, keep_attempts_days}'::text[]) n (name)
$$;

-- The days that are past keep_days and hold events, the oldest first. A partition counts as past when its end is: its
-- newest event is older. DEFAULT counts when it has an event that is. With `wanted`, no other day is looked at.
create or replace function outbox_internal.past_days(wanted date default null) returns table (day date, part regclass, before timestamptz)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    t outbox.retention := (select r from outbox.retention r);
    cutoff constant timestamptz := clock_timestamp() - make_interval(days => t.keep_days);
    has_past boolean := false;
begin
    if t.keep_days = 0 then
        return;
    end if;
    if coalesce(wanted, '-infinity') = '-infinity' then
        has_past := exists (select from outbox.event_default d where d.created_at < cutoff);
    end if;
    return query
    select p.day, p.part, case when p.day = '-infinity' then cutoff end
      from outbox_internal.partitions() p
     where case when p.day <> wanted then false
                when p.day = '-infinity' then has_past
                else p.upto <= cutoff and pg_relation_size(p.part) > 0 end
     order by p.day;
end
$$;

-- Check a day that is past keep_days: `kept_by` is what keeps it, and `changed` says whether that is news, of which a notice
-- is made. Without a lease it only looks. With one it records the snapshot, the configuration and the server of the check,
-- by which outbox_internal.empty_day finds out what has changed since. `archived` says whether a verified archive has every
-- event of the day.
create or replace function outbox_internal.check_day(
    day date, lease bigint, out kept_by jsonb, out changed boolean, out archived boolean, out writing_to text
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    snap pg_snapshot;
    config_now bigint;
    due record;
    c outbox.day;
    receiver constant text := outbox_internal.notify_sink();
    cause text;
begin
    perform outbox_internal.at_home();
    select coalesce(d.before, 'infinity') as before, d.part into due from outbox_internal.past_days(coalesce(check_day.day, 'infinity')) d;
    if due is null then
        kept_by := '[]';
        changed := false;
        archived := false;
        return;
    end if;
    config_now := (select m.config from outbox.meta m);
    snap := pg_current_snapshot();
    kept_by := outbox_internal.retention_blockers(day, due.before);
    select * into c from outbox.day d where d.day = check_day.day and d.emptied_at is null;
    kept_by := outbox_internal.kept_since(kept_by, coalesce(c.kept_by, '[]'));
    changed := outbox_internal.blocker_names(kept_by) <> outbox_internal.blocker_names(coalesce(c.kept_by, '[]'));
    archived := c.archived_to is not null and c.archived_on = outbox_internal.incarnation()
                and c.archived_before >= due.before and not outbox_internal.came_since(due.part, c.archived_snapshot);
    writing_to := c.writing_to;
    if lease is null then
        return;
    end if;
    perform outbox_internal.renew_retention(lease);
    insert into outbox.day as d (day, part, kept_by)
    select check_day.day, 1 + coalesce((select max(o.part) from outbox.day o where o.day = check_day.day), 0), kept_by
     where c.day is null
        on conflict do nothing;  -- an erasure made it meanwhile
    update outbox.day d
       set kept_by = check_day.kept_by,
           checked_snapshot = case when check_day.kept_by = '[]' then snap end,
           checked_config = config_now, checked_on = outbox_internal.incarnation(), checked_before = due.before,
           deleted_at = null, deleted_id = null,
           unfinished = case when archived then d.unfinished else outbox_internal.with_archive(d.unfinished, d.archived_to) end,
           archived_to = case when archived then d.archived_to end, sha256 = case when archived then d.sha256 end,
           events = case when archived then d.events end,
           archived_snapshot = case when archived then d.archived_snapshot end
     where d.day = check_day.day and d.emptied_at is null;
    -- The same keepers are one cause, whatever the day. If the receiver of notices keeps it alone, it is not told.
    cause := left(array_to_string(outbox_internal.blocker_names(kept_by), ', '), 500);
    if changed and receiver is not null and cause not in ('', 'sink ' || receiver) then
        perform outbox_internal.make_notice('outbox.retention.blocked', '', cause, jsonb_build_object(
            'day', case when day = '-infinity' then 'default' else day::text end,
            'kept_by', (select jsonb_agg(jsonb_build_object('kind', m.one -> 'kind', 'name', m.one -> 'name',
                                                            'since', m.one -> 'since') order by m.place)
                          from jsonb_array_elements(kept_by) with ordinality m (one, place) where m.place <= 20)));
    end if;
end
$$;

-- Count the next `most` (at most 100,000) events of a day as outbox_internal.read_day_events reads them, without their
-- contents: how many there are, and the last of them. Fewer than `most` are the last ones.
create or replace function outbox_internal.count_day(
    day date, lease bigint, after_id bigint, after_uid uuid, most integer,
    out events bigint, out last_id bigint, out last_uid uuid
)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_variable
declare
    c constant outbox.day := outbox_internal.checked_day(day, lease);
    part constant regclass := outbox_internal.part_of(day);
begin
    most := least(greatest(coalesce(most, 1000), 1), 100000);
    execute format(
        'select count(*), (array_agg(r.id order by r.id desc, r.uid desc))[1], '
        '       (array_agg(r.uid order by r.id desc, r.uid desc))[1] '
        '  from (select e.id, e.uid from %s e where e.id >= $1 and (e.id, e.uid) > ($1, $2) and e.created_at < $5 '
        '           and (e.id <= $6 or pg_visible_in_snapshot(e.xid, $4)) order by e.id, e.uid limit $3) r', part)
       into events, last_id, last_uid
      using coalesce(after_id, -9223372036854775808), coalesce(after_uid, '00000000-0000-0000-0000-000000000000'), most,
            c.checked_snapshot, c.checked_before, (select m.floor from outbox.meta m);
end
$$;

-- The newest check of a day; raises unless it was done under this lease and on this server.
create or replace function outbox_internal.checked_day(day date, lease bigint) returns outbox.day
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    found constant outbox.day := (select d from outbox.day d where d.day = checked_day.day and d.emptied_at is null);
begin
    if found.checked_snapshot is null or outbox_internal.part_of(day) is null
       or not exists (select from outbox.retention r where r.lease = checked_day.lease) then
        raise exception 'day % was not checked under lease %, or retention lease % was taken over', day, lease, lease
            using errcode = 'object_not_in_prerequisite_state';
    end if;
    perform outbox_internal.only_at(found.checked_on);
    return found;
end
$$;

-- Record why a pass left a day that nothing keeps, for people.
create or replace function outbox_internal.leave_day(day date, lease bigint, reason text) returns void
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    select outbox_internal.renew_retention(lease);
    update outbox.day d
       set left_because = outbox_internal.short_text(reason, 1000), left_at = clock_timestamp()
     where d.day = leave_day.day and d.emptied_at is null;
$$;

-- Empty a day that was checked: "emptied"; "again" when something has changed since the check; "locked" if a lock was
-- not granted, or not for long enough; "archive" when it must be archived first. Of the DEFAULT partition up to 1,000
-- events are deleted, and "more" says that some are left.
--
-- Nothing is waited for longer than 50 ms. First it locks the row of the configuration, which every change of a sink's
-- positions raises, then the partition. Under the lock only what came since the check is looked for, by an index. The
-- lock is given up after 100 ms. A COMMIT that waited for a standby would keep it: this one does not wait. Nor does a
-- block of a session keep it: this must be a transaction of its own.
create or replace function outbox_internal.empty_day(day date, lease bigint, events bigint) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set jit = off
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
    perform outbox_internal.begin_action('outbox_internal.empty_day');
    if transaction_timestamp() <> statement_timestamp() then
        raise exception 'outbox_internal.empty_day must be a transaction of its own, which ends at once'
            using errcode = 'invalid_transaction_state';
    end if;
    perform outbox_internal.at_home();
    perform outbox_internal.renew_retention(lease);
    select * into c from outbox.day d where d.day = empty_day.day and d.emptied_at is null for update;
    if c.deleted_at is not null then
        -- Not looked for again: the entries of deleted events may still be in the index.
        select 'outbox.event_default'::regclass as part into due
          from outbox.retention r
         where r.keep_days > 0 and c.checked_before <= clock_timestamp() - make_interval(days => r.keep_days);
    else
        select d.part into due from outbox_internal.past_days(coalesce(empty_day.day, 'infinity')) d;
    end if;
    if due is null or c.checked_snapshot is null or c.checked_on <> outbox_internal.incarnation()
       or (select r.hold_until > clock_timestamp() from outbox.retention r) then
        return 'again';
    end if;
    if (select r.archive from outbox.retention r)
       and (c.archived_to is null or c.archived_on <> outbox_internal.incarnation() or c.archived_before < c.checked_before) then
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
            perform outbox_internal.record_action('retention', null, '{"day": "default"}', removed,
                                         (select r.actor from outbox.retention r), (select r.reason from outbox.retention r));
            return 'more';
        end if;
    else
        size := pg_total_relation_size(due.part);
        -- Once before, so that under the lock every page is in memory.
        perform outbox_internal.came_since(due.part, c.checked_snapshot), outbox_internal.came_since(due.part, c.archived_snapshot);
        begin
            execute format('lock table %s in access exclusive mode', due.part);
        exception when lock_not_available then
            update outbox.day d
               set kept_by = outbox_internal.kept_since(outbox_internal.day_holders(due.part, array[
                       'AccessShareLock', 'RowShareLock', 'RowExclusiveLock', 'ShareUpdateExclusiveLock', 'ShareLock',
                       'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock']), c.kept_by)
             where d.day = empty_day.day and d.emptied_at is null;
            return 'locked';
        end;
        began := clock_timestamp();
        if outbox_internal.came_since(due.part, c.checked_snapshot)
           or (c.archived_snapshot is not null and outbox_internal.came_since(due.part, c.archived_snapshot)) then
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
    perform outbox_internal.record_action('retention', null, jsonb_build_object('day', replace(day::text, '-infinity', 'default')),
                                 coalesce(removed, c.events, greatest(events, 0), 0),
                                 (select r.actor from outbox.retention r), (select r.reason from outbox.retention r));
    return 'emptied';
end
$$;

-- Remove the oldest empty partition that ended more than a day ago and is past keep_days, and return its day; null
-- when there is none, or when its lock was not granted within 50 ms. Every emit waits behind this one meanwhile.
create or replace function outbox_internal.drop_day(lease bigint) returns date
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
as $$
declare
    keep constant integer := (select r.keep_days from outbox.retention r);
    oldest record;
    filled boolean;
begin
    if transaction_timestamp() <> statement_timestamp() then
        raise exception 'outbox_internal.drop_day must be a transaction of its own, which ends at once'
            using errcode = 'invalid_transaction_state';
    end if;
    perform outbox_internal.renew_retention(lease);
    select p.part, p.day into oldest
      from outbox_internal.partitions() p
     where keep > 0 and p.day <> '-infinity' and pg_relation_size(p.part) = 0
       and p.upto <= clock_timestamp() - make_interval(days => greatest(keep, 1))
     order by p.day limit 1;
    if not found then
        return null;
    end if;
    perform set_config('synchronous_commit', 'local', true);
    begin
        lock table only outbox.event in access exclusive mode;
        execute format('lock table %s in access exclusive mode', oldest.part);
        lock table outbox.event_default in access exclusive mode;
        execute format('select exists (select from %s)', oldest.part) into filled;
        if filled then
            return null;
        end if;
        execute format('alter table outbox.event detach partition %s', oldest.part);
        execute format('drop table %s', oldest.part);
    exception when lock_not_available then
        return null;
    end;
    return oldest.day;
end
$$;

-- Refuse a range that begins before the end of a day that was emptied: the log does not have it any more. The day of an
-- event is found by the partitions that are left; a day that held nothing is none.
create or replace function outbox_internal.require_days(since timestamptz) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
as $$
declare
    oldest timestamptz;
begin
    select max(coalesce(p.upto, d.next_day, d.day + 1)) into oldest
      from (
        select o.day, lead(o.day) over (order by o.day) as next_day, o.emptied_at, o.events
          from (select d.day, max(d.emptied_at) as emptied_at, sum(d.events) as events
                  from outbox.day d where d.day <> '-infinity' group by d.day) o
      ) d
      left join outbox_internal.partitions() p on p.day = d.day
     where d.emptied_at is not null and coalesce(d.events, 1) > 0;
    oldest := greatest(oldest, (select max(d.checked_before) from outbox.day d
                                 where d.day = '-infinity' and d.emptied_at is not null and coalesce(d.events, 1) > 0));
    if since < oldest then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('the log no longer has all events since %s: the oldest day that it has is %s',
                             outbox_internal.loadable_time(since), oldest::date),
            hint = format('Begin at %s or later; older events are in the archive, if there is one.', oldest::date);
    end if;
end
$$;

-- Look at the next `most` dead rows, in the order of sinks and ids, and discard those that died more than keep_dead_days ago,
-- each with a mark. Rows whose events would be read again (see outbox_internal.discard_rows) are left for the next lap. `removed`
-- counts; `left_over` says that the lap is not over. A lap is one row of the audit, once something was discarded.
--
-- Shards are locked, as in outbox.discard_deliveries: call it in a transaction of its own.
create or replace function outbox_internal.discard_expired(lease bigint, most integer, out removed integer, out left_over boolean)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set lock_timeout = '2s'
set jit = off
as $$
declare
    t outbox.retention;
    cutoff timestamptz;
    looked_at bigint[];
    sinks text[];
    reason_text text;
begin
    perform outbox_internal.begin_action('outbox_internal.discard_expired');
    perform outbox_internal.renew_retention(lease);
    select * into t from outbox.retention;
    most := least(greatest(coalesce(most, 1000), 1), 1000);
    removed := 0;
    left_over := false;
    if t.keep_dead_days = 0 or t.hold_until > clock_timestamp() then
        return;
    end if;
    cutoff := clock_timestamp() - make_interval(days => t.keep_dead_days);
    reason_text := format('dead for more than %s days (keep_dead_days)', t.keep_dead_days);
    lock table outbox.event, outbox.sink, outbox.shard, outbox.progress in access share mode;
    select array_agg(n.id), array_agg(n.sink) into looked_at, sinks
      from (
        select d.id, d.sink from outbox.delivery d
         where d.state = 'dead' and (d.sink, d.id) > (coalesce(t.dead_cursor_sink, ''), coalesce(t.dead_cursor_id, 0))
         order by d.sink, d.id limit most
      ) n;
    select r.done into removed
      from outbox_internal.discard_rows(looked_at, sinks, null, null, cutoff, t.actor, reason_text) r;
    left_over := coalesce(cardinality(looked_at) = most, false);
    if removed > 0 then
        t.dead_audit := outbox_internal.record_action(
            'retention dead', null, jsonb_build_object('keep_dead_days', t.keep_dead_days), removed, t.actor, reason_text,
            (select a.id from outbox.audit a
              where a.id = t.dead_audit and a.actor is not distinct from t.actor and a.reason = reason_text
                and a.role_name = outbox_internal.emitter() and a.login = session_user
                and a.at > clock_timestamp() - interval '1 hour'));
    end if;
    update outbox.retention r
       set dead_cursor_sink = case when left_over then sinks[most] end,
           dead_cursor_id = case when left_over then looked_at[most] end,
           dead_audit = case when left_over then t.dead_audit end;
end
$$;

-- Look at the next `most` uids that callers chose, in their order, and remove those that are past keep_uids_days and that
-- no event of the log or row of `delivery` has. `removed` counts them; `left_over` says that the lap is not over. It begins
-- again an hour after its end.
create or replace function outbox_internal.trim_uids(lease bigint, most integer, out removed integer, out left_over boolean)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set jit = off
as $$
declare
    t outbox.retention;
    cutoff timestamptz;
    last_uid uuid;
    looked integer;
begin
    perform outbox_internal.renew_retention(lease);
    most := least(greatest(coalesce(most, 1000), 1), 1000);
    select * into t from outbox.retention;
    removed := 0;
    left_over := false;
    if t.keep_uids_days = 0 or t.hold_until > clock_timestamp()
       or (t.uid_cursor is null and t.uid_lap_at > clock_timestamp() - interval '1 hour'
           and t.uid_lap_at <= clock_timestamp()) then
        return;
    end if;
    cutoff := clock_timestamp() - make_interval(days => t.keep_uids_days);
    select count(*), (array_agg(n.uid order by n.uid desc))[1] into looked, last_uid
      from (select u.uid from outbox.uid u where t.uid_cursor is null or u.uid > t.uid_cursor
             order by u.uid limit most) n;
    delete from outbox.uid u
     where u.uid <= last_uid and (t.uid_cursor is null or u.uid > t.uid_cursor) and u.created_at < cutoff
       and not exists (select from outbox.scheduled s where s.uid = u.uid)
       and outbox_internal.event_id(u.uid) is null
       and not exists (select from outbox.delivery d where d.uid = u.uid);
    get diagnostics removed = row_count;
    left_over := looked = most;
    update outbox.retention r
       set uid_cursor = case when left_over then last_uid end,
           uid_lap_at = case when left_over then r.uid_lap_at else clock_timestamp() end;
end
$$;
