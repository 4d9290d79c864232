-- Retention: which days of the log are kept, by whom, and how a day is emptied. Relays made for version 2 work on this
-- schema: they empty nothing.

-- ---------------------------------------------------------------------------------------------------------
-- Policy, lease and clock
-- ---------------------------------------------------------------------------------------------------------

-- The table [retention] of a relay's file; null: the file has none.
alter table outbox.relay add column retention jsonb;

-- `unset_days` is what a relay without [retention] says: 30 in a new database, 0 in one that existed before, where it
-- has no say. Days of 0 mean no limit. Only functions write here, so no relay decides alone.
create table outbox.retention (
    single boolean primary key default true check (single),
    unset_days integer not null,
    stated boolean not null default false,
    keep_days integer not null,
    keep_uids_days integer not null,
    keep_dead_days integer not null default 0,
    keep_attempts_days integer not null default 14,
    archive boolean not null default false,
    lower_since timestamptz,
    lower_asked jsonb,
    clock_mark timestamptz,
    worked_at timestamptz,
    hold_until timestamptz,
    epoch bigint not null default 0,
    lease bigint,
    owner uuid,
    actor text,
    lease_until timestamptz,
    uid_cursor uuid,
    uid_lap_at timestamptz,
    dead_cursor_sink text collate "C",
    dead_cursor_id bigint,
    dead_audit bigint
);
comment on column outbox.retention.lower_since is
    'Since when the files of all live relays have asked for less than keep_days: it is lowered a day later.';
comment on column outbox.retention.lower_asked is
    'The values that they ask for by now. Whenever one becomes less, lower_since begins again.';
comment on column outbox.retention.lease is
    'The number that each step of the newest pass names. It is random: no other process can guess it.';
comment on column outbox.retention.dead_cursor_id is
    'The last dead row that was looked at, with its sink; null: the next one is the first. `dead_audit` counts since then.';
comment on column outbox.retention.worked_at is
    'When the newest pass began that does its steps; -infinity: none yet, only passes of relays with enabled = false.';
comment on column outbox.retention.clock_mark is 'The clock of the newest pass; a larger step than a day is a jump.';
comment on column outbox.retention.hold_until is 'Nothing is emptied until then, because the clock has jumped.';

-- A new database: its schema was made by this transaction.
insert into outbox.retention (unset_days, keep_days, keep_uids_days)
select d.days, d.days, d.days
  from (select case when n.xmin = pg_current_xact_id()::xid then 30 else 0 end as days
          from pg_namespace n where n.nspname = 'outbox') d;

-- The known facts of each day. A day that was emptied may get events again, when a clock steps back: then it gets
-- another part. The part that is not emptied yet has the newest check, and the archive that was verified. `day` is the
-- first day of a partition; -infinity means the DEFAULT partition.
create table outbox.day (
    day date not null,
    part integer not null default 1,
    events bigint,
    bytes bigint,
    archived_to text,
    sha256 text,
    emptied_at timestamptz,
    kept_by jsonb not null default '[]',
    left_because text,
    left_at timestamptz,
    checked_snapshot pg_snapshot,
    checked_config bigint,
    checked_before timestamptz,
    checked_on text,
    deleted_at timestamptz,
    deleted_id bigint,
    archived_snapshot pg_snapshot,
    archived_before timestamptz,
    archived_on text,
    writing_to text,
    unfinished text[] not null default '{}',
    primary key (day, part)
);
create unique index day_current on outbox.day (day) where emptied_at is null;
comment on column outbox.day.archived_snapshot is
    'The archive holds every event that this snapshot shows. A change of events that are in it must clear this column.';
comment on column outbox.day.checked_before is 'Of the DEFAULT partition, only events from before this time were checked.';
comment on column outbox.day.deleted_at is
    'Time and id of the last event that was deleted from the DEFAULT partition since the check: the next step begins there.';
comment on column outbox.day.left_because is
    'Why the newest pass that tried to empty the day, which nothing kept, left it: the archive failed, or a lock was not granted.';
comment on column outbox.day.writing_to is 'An archive that was begun and is not verified.';
comment on column outbox.day.unfinished is
    'The newest archives that were given up, or do not have every event any more. Their objects can be removed.';

-- Keep the name of an archive that loses its place, by whatever statement, until its objects are removed.
create function outbox.keep_archive_names() returns trigger
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    most constant integer := 100;
    names text[];
begin
    names := array(
        select n.name from unnest(new.unfinished || old.archived_to || old.writing_to) with ordinality n (name, place)
         where n.name is not null and n.name is distinct from new.archived_to and n.name is distinct from new.writing_to
         group by n.name order by min(n.place));
    new.unfinished := names[greatest(cardinality(names) - most, 0) + 1:];
    return new;
end
$$;

create trigger keep_archive_names before update of archived_to, writing_to on outbox.day
for each row execute function outbox.keep_archive_names();

-- The past events of the DEFAULT partition, which one deletes in steps. Every other partition is looked at as a whole. The id
-- is hidden in an expression that no other statement has: else a plan for ids may go through this index from end to end.
create index event_default_created_at on outbox.event_default (created_at, (id - 0));

-- The partitions of the log, with the day at which each begins and the time at which it ends. Those that do not begin at
-- midnight (UTC) are left out: they were made by hand.
create function outbox.partitions() returns table (part regclass, day date, upto timestamptz)
language sql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
as $$
    select p.part, p.first::date, p.upto
      from (
        select c.oid::regclass as part,
               case when b.bound = 'DEFAULT' then '-infinity' else split_part(b.bound, '''', 2)::timestamptz end as first,
               case when b.bound = 'DEFAULT' then 'infinity' else split_part(b.bound, '''', 4)::timestamptz end as upto
          from pg_inherits i
          join pg_class c on c.oid = i.inhrelid
         cross join lateral (select pg_get_expr(c.relpartbound, c.oid) as bound) b
         where i.inhparent = 'outbox.event'::regclass
           and (b.bound = 'DEFAULT' or b.bound like 'FOR VALUES FROM (''%'') TO (''%'')')
      ) p
     where p.first = p.first::date::timestamptz
$$;

-- True if one value of a policy keeps less than the same value of another, as JSON. Days of 0 mean no limit; a null in
-- place of a policy has no values.
create function outbox.asks_less(asked jsonb, other jsonb) returns boolean
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
    select coalesce(bool_or((asked ->> n.name)::integer > 0
                            and ((other ->> n.name)::integer = 0
                                 or (asked ->> n.name)::integer < (other ->> n.name)::integer)), false)
           or coalesce((other ->> 'archive')::boolean and not (asked ->> 'archive')::boolean, false)
      from unnest('{keep_days, keep_uids_days, keep_dead_days, keep_attempts_days}'::text[]) n (name)
$$;

-- The partition that begins at a day.
create function outbox.part_of(day date) returns regclass
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select p.part from outbox.partitions() p where p.day = part_of.day
$$;

-- The larger one of two numbers of days; 0 means no limit.
create function outbox.more_days(days integer, other integer) returns integer
language sql immutable
return case when days = 0 or other = 0 then 0 else greatest(days, other) end;

-- True if the role of this session was granted `kind`, itself or as a member of a role, or is the owner of the schema.
create function outbox.acts_as(kind text) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select exists (
        select from pg_roles r
         where (r.rolname in (select g.role_name from outbox.grantee g where g.kind = acts_as.kind)
                or r.oid = (select n.nspowner from pg_namespace n where n.nspname = 'outbox'))
           and pg_has_role(outbox.emitter()::name, r.oid, 'usage'))
$$;

-- Recompute the policy from the files of the live relays. For each kind of days 0 (no limit) wins, else the largest. More
-- is kept at once. Less is kept when all live relays have asked for that much or less for a day without a break, or
-- `at_once`: a relay that is about to start again may have the larger value. An hour without any pass is a break. A file
-- without [retention] has a say in a new database only; there the first files count at once. A lower policy is recorded.
create function outbox.weigh_retention(at_once boolean, by_actor text) returns outbox.retention
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
    if not less or at_once or (not t.stated and t.unset_days > 0) or since < clock_timestamp() - interval '1 day' then
        if less then
            perform outbox.record_action('retention policy', null, asked, 1, outbox.short_text(by_actor, 255), null);
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

-- Move the clock's mark. After a step of more than a day, ahead of it or without any relay, nothing is emptied for as
-- long as the step was, at most for keep_days: then no event is emptied that has not been kept for keep_days of time that
-- passed. Before the first pass, the newest event is the mark. A clock that comes back ends the wait.
create function outbox.mark_clock() returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    here constant timestamptz := clock_timestamp();
    t outbox.retention := (select r from outbox.retention r);
    keep constant interval := make_interval(days => t.keep_days);
    mark timestamptz := t.clock_mark;
    until timestamptz := t.hold_until;
begin
    if mark is null then
        select e.created_at into mark from outbox.event e order by e.id desc limit 1;
        mark := greatest(least(coalesce(mark, here), here), here - keep - interval '2 days');
    end if;
    if here - mark > interval '1 day' then
        until := greatest(until, here + least(here - mark, keep));
    elsif until > here + keep then
        until := null;
    end if;
    update outbox.retention r set clock_mark = here, hold_until = case when until > here then until end;
end
$$;

-- Duration of a lease, from 1 second to 10 minutes; null: a minute.
create function outbox.lease_interval(seconds double precision) returns interval
language sql immutable
return least(greatest(coalesce(seconds, 60), 1), 600) * interval '1 second';

-- Begin a pass: claim the lease for `lease_for` seconds, weigh the policy, mark the clock. `lease` is null while another
-- process has it; each step of the pass names it. One that asks `at_once` lets a lower policy count from now on: a role
-- that was granted `operate` may. One without `works` does no steps: that of a relay with enabled = false.
create function outbox.begin_retention(
    owner_id uuid, by_actor text, lease_for double precision, at_once boolean default false, works boolean default true,
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
begin
    if owner_id is null then
        raise exception using errcode = 'invalid_parameter_value', message = 'owner_id must be a uuid, not null';
    end if;
    if at_once and not outbox.acts_as('operate') then
        raise exception 'at_once needs the right to operate: role "%" does not have it', outbox.emitter()
            using errcode = 'insufficient_privilege', hint = 'outbox-relay migrate --grant-operate ROLE gives it.';
    end if;
    select * into t from outbox.retention for update skip locked;
    -- A lease of more than an hour was given by a clock that has come back since.
    if not found or (t.owner <> owner_id and t.lease_until > here and t.lease_until < here + interval '1 hour') then
        return;
    end if;
    t := outbox.weigh_retention(at_once, by_actor);
    perform outbox.mark_clock();
    update outbox.retention r
       set epoch = r.epoch + 1, owner = owner_id,
           lease = ('x' || right(replace(gen_random_uuid()::text, '-', ''), 15))::bit(60)::bigint,
           actor = outbox.short_text(by_actor, 255),
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

-- Renew the lease for `lease_for` seconds, or refuse: another process has claimed it since. It stays locked until the end
-- of the transaction.
create function outbox.renew_retention(lease bigint, lease_for double precision default 60) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    update outbox.retention r
       set lease_until = clock_timestamp() + outbox.lease_interval(lease_for)
     where r.lease = renew_retention.lease and r.owner is not null;
    if not found then
        raise exception 'retention lease % was taken over', lease
            using errcode = 'object_not_in_prerequisite_state';
    end if;
end
$$;

-- Give the lease back.
create function outbox.end_retention(lease bigint) returns void
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    update outbox.retention r set owner = null, lease_until = null where r.lease = end_retention.lease
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Days
-- ---------------------------------------------------------------------------------------------------------

-- The days that are past keep_days and hold events, the oldest first. A partition counts as past when its end is: its
-- newest event is older. DEFAULT counts when it has an event that is. With `wanted`, no other day is looked at.
create function outbox.past_days(wanted date default null) returns table (day date, part regclass, before timestamptz)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
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
    select p.day, p.part, case when p.day = '-infinity' then cutoff else 'infinity' end
      from outbox.partitions() p
     where case when p.day <> wanted then false
                when p.day = '-infinity' then has_past
                else p.upto <= cutoff and pg_relation_size(p.part) > 0 end
     order by p.day;
end
$$;

-- The days that a pass is to check, as text: not every client can load -infinity.
create function outbox.due_days() returns table (day text)
language sql stable security definer
set search_path = pg_catalog, pg_temp
set datestyle = 'ISO, YMD'
as $$
    select d.day::text from outbox.past_days() d
$$;

-- The reasons that keep a day, as a JSON array of objects with `kind` and `name`: sinks that have not settled an event
-- of it, with the number of shards that stand before one; replays that may still read one; transactions that may still
-- write into it. Of the DEFAULT partition, events from `before` on are left out. Rows of `delivery` keep nothing: they
-- have copies.
--
-- Each piece that a sink has left is looked for by an index: the latecomers of a tick by their transactions, the rest by
-- id.
create function outbox.day_keepers(day date, before timestamptz default 'infinity') returns jsonb
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
#variable_conflict use_variable
declare
    part constant regclass := outbox.part_of(day);
    kept jsonb := '[]';
    sink record;
    piece record;
    behind smallint[];
    there boolean;
begin
    for sink in select k.name, k.paused from outbox.sink k order by k.name loop
        behind := '{}';
        for piece in select * from outbox.unsettled(sink.name) loop
            if piece.late then
                execute format(
                    'select exists (select from %1$s e where e.xid = any (array(select pg_snapshot_xip($1))) '
                    '        and e.id + 0 > $3 and e.id + 0 <= $4 and e.shard = any ($5) and e.created_at < $6) '
                    '    or exists (select from %1$s e where e.xid >= pg_snapshot_xmax($1) and e.xid < $2::text::xid8 '
                    '        and e.id + 0 > $3 and e.id + 0 <= $4 and e.shard = any ($5) and e.created_at < $6)', part)
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
    return kept || outbox.replay_keepers(part, before) || outbox.day_holders(part, array['RowExclusiveLock']);
end
$$;

-- The transactions that hold one of these locks of a partition, as day_keepers has it; at most five.
create function outbox.day_holders(part regclass, modes text[]) returns jsonb
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

-- Refuse a day that is null, which would mean all days.
create function outbox.require_day(day date) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if day is null then
        raise exception using errcode = 'invalid_parameter_value', message = 'day must be a date, not null';
    end if;
end
$$;

-- Refuse while the log's transaction numbers are not this server's: see outbox.tick.
create function outbox.at_home() returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if (select m.system_identifier from outbox.meta m)
       is distinct from (select c.system_identifier from pg_control_system() c) then
        raise exception 'the log comes from another cluster, as after a restore, a move or pg_upgrade: '
            'stop every relay, then run outbox-relay rebase' using errcode = 'OR002';
    end if;
end
$$;

-- `kept` with the time since which each of its members has kept the day, from `earlier`.
create function outbox.kept_since(kept jsonb, earlier jsonb) returns jsonb
language sql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
    select coalesce(jsonb_agg(
               n.one || jsonb_build_object('since', coalesce(
                   (select o.one -> 'since' from jsonb_array_elements(earlier) o (one)
                     where o.one -> 'kind' = n.one -> 'kind' and o.one -> 'name' = n.one -> 'name' limit 1),
                   to_jsonb(date_trunc('second', clock_timestamp()))))
               order by n.place), '[]')
      from jsonb_array_elements(kept) with ordinality n (one, place)
$$;

-- The names in `kept`, by which a change is news: transactions come and go, and so do the shards of a sink.
create function outbox.keeper_names(kept jsonb) returns text[]
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
    select array(select distinct case when k ->> 'kind' = 'transaction' then 'a transaction'
                                      else concat(k ->> 'kind', ' ', k ->> 'name') end
                   from jsonb_array_elements(kept) k order by 1)
$$;

-- Check a day that is past keep_days: `kept_by` is what keeps it, and `changed` says whether that is news. Without a
-- lease it only looks. With one it records the snapshot, the configuration and the server of the check, by which
-- outbox.empty_day finds out what has changed since. `archive` says whether an archive is still to be written.
create function outbox.check_day(
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
begin
    perform outbox.require_day(day), outbox.at_home();
    select d.before, d.part into due from outbox.past_days(check_day.day) d;
    if due is null then
        kept_by := '[]';
        changed := false;
        archived := false;
        return;
    end if;
    config_now := (select m.config from outbox.meta m);
    snap := pg_current_snapshot();
    kept_by := outbox.day_keepers(day, due.before);
    select * into c from outbox.day d where d.day = check_day.day and d.emptied_at is null;
    kept_by := outbox.kept_since(kept_by, coalesce(c.kept_by, '[]'));
    changed := outbox.keeper_names(kept_by) <> outbox.keeper_names(coalesce(c.kept_by, '[]'));
    archived := c.archived_to is not null and c.archived_on = outbox.incarnation()
                and c.archived_before >= due.before and not outbox.came_since(due.part, c.archived_snapshot);
    writing_to := c.writing_to;
    if lease is null then
        return;
    end if;
    perform outbox.renew_retention(lease);
    insert into outbox.day as d (day, part, kept_by)
    select check_day.day, 1 + coalesce((select max(o.part) from outbox.day o where o.day = check_day.day), 0), kept_by
     where c.day is null
        on conflict do nothing;  -- an erasure made it meanwhile
    update outbox.day d
       set kept_by = check_day.kept_by,
           checked_snapshot = case when check_day.kept_by = '[]' then snap end,
           checked_config = config_now, checked_on = outbox.incarnation(), checked_before = due.before,
           deleted_at = null, deleted_id = null,
           archived_to = case when archived then d.archived_to end, sha256 = case when archived then d.sha256 end,
           events = case when archived then d.events end,
           archived_snapshot = case when archived then d.archived_snapshot end
     where d.day = check_day.day and d.emptied_at is null;
end
$$;

-- True if a partition has an event that was committed after a snapshot of this server: of a transaction that ran then,
-- or of one that began since. Ids up to the floor carry numbers of another server; nothing was added to those since the
-- rebase. What began since has a number below the next one, so that such numbers far ahead are not walked through.
create function outbox.came_since(part regclass, snap pg_snapshot) returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
declare
    found_one boolean;
begin
    if snap is null then
        return true;
    end if;
    execute format(
        'select exists (select from %1$s e where e.xid = any (array(select pg_snapshot_xip($1))) and e.id + 0 > $2) '
        '    or exists (select from %1$s e where e.xid >= pg_snapshot_xmax($1) '
        '        and e.xid < pg_snapshot_xmax(pg_current_snapshot()) and e.id + 0 > $2)', part)
       into found_one using snap, (select m.floor from outbox.meta m);
    return found_one;
end
$$;

-- The newest check of a day; raises unless it was done under this lease and on this server.
create function outbox.checked_day(day date, lease bigint) returns outbox.day
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    found constant outbox.day := (select d from outbox.day d where d.day = checked_day.day and d.emptied_at is null);
begin
    if found.checked_snapshot is null or outbox.part_of(day) is null
       or not exists (select from outbox.retention r where r.lease = checked_day.lease) then
        raise exception 'day % was not checked under lease %, or retention lease % was taken over', day, lease, lease
            using errcode = 'object_not_in_prerequisite_state';
    end if;
    perform outbox.only_at(found.checked_on);
    return found;
end
$$;

-- The next events of a day behind (after_id, after_uid) that its check saw, in that order, all columns as text or bytes:
-- at most `most_rows` (10,000), ended by the one that exceeds `most_bytes` (256 MiB). Times and headers are text, since not
-- every client can load every value. The role needs to be one that may read payloads: an archive holds whole events. The
-- manifest beside it lists the keyed hashes of keys, by which the archives of a key are found after the key was erased.
create function outbox.read_day(
    day date, lease bigint, after_id bigint, after_uid uuid, most_rows integer, most_bytes bigint
) returns table (
    id bigint, xid text, shard smallint, uid text, type text, key text, content_type text, headers text,
    deliver_at text, created_at text, emitter text, payload bytea, key_hash text
)
language plpgsql stable security definer rows 1000
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
#variable_conflict use_variable
declare
    c constant outbox.day := outbox.checked_day(day, lease);
    part constant regclass := outbox.part_of(day);
begin
    most_rows := least(greatest(coalesce(most_rows, 1000), 1), 10000);
    most_bytes := least(greatest(coalesce(most_bytes, 8388608), 1), 268435456);
    return query execute format(
        'select w.id, w.xid::text, w.shard, w.uid::text, w.type, w.key, w.content_type, w.headers::text, '
        '       w.deliver_at::text, w.created_at::text, w.emitter, w.payload, outbox.keyed_hash(w.key) '
        '  from (select f.*, sum(coalesce(octet_length(f.payload), 0)) '
        '                    over (order by f.id, f.uid rows between unbounded preceding and 1 preceding) as bytes '
        '          from (select e.* from %s e '
        '                 where e.id >= $1 and (e.id, e.uid) > ($1, $2) and e.created_at < $6 '
        '                   and (e.id <= $7 or pg_visible_in_snapshot(e.xid, $5)) '
        '                 order by e.id, e.uid limit $3) f) w '
        ' where w.bytes is null or w.bytes < $4 order by w.id, w.uid', part)
        using coalesce(after_id, -9223372036854775808),
              coalesce(after_uid, '00000000-0000-0000-0000-000000000000'), most_rows, most_bytes, c.checked_snapshot, c.checked_before,
              (select m.floor from outbox.meta m);
end
$$;

-- Count the next `most` (at most 100,000) events of a day as outbox.read_day reads them, without their contents: how many
-- there are, and the last of them. Fewer than `most` are the last ones.
create function outbox.count_day(
    day date, lease bigint, after_id bigint, after_uid uuid, most integer,
    out events bigint, out last_id bigint, out last_uid uuid
)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
#variable_conflict use_variable
declare
    c constant outbox.day := outbox.checked_day(day, lease);
    part constant regclass := outbox.part_of(day);
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

-- Record that an archive of a day is about to be written to this address, before its first byte is.
create function outbox.begin_archive(day date, lease bigint, address text, removed text[] default '{}') returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform outbox.renew_retention(lease);
    update outbox.day d set writing_to = address where d.day = begin_archive.day and d.emptied_at is null;
    update outbox.day d set unfinished = array(select u from unnest(d.unfinished) u where u <> all (removed))
     where d.day = begin_archive.day and d.emptied_at is null;
end
$$;

-- Record why a pass left a day that nothing keeps, for people.
create function outbox.leave_day(day date, lease bigint, reason text) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform outbox.renew_retention(lease);
    update outbox.day d
       set left_because = outbox.short_text(reason, 1000), left_at = clock_timestamp()
     where d.day = leave_day.day and d.emptied_at is null;
end
$$;

-- The archives of a day that is not emptied that were begun or superseded, and whose objects can be removed. Nothing is
-- recorded of them under an older lease than the caller's.
create function outbox.unfinished_archives(day date, lease bigint) returns text[]
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform outbox.renew_retention(lease);
    return (select array_remove(d.unfinished || d.writing_to, null) from outbox.day d
             where d.day = unfinished_archives.day and d.emptied_at is null);
end
$$;

-- Record a verified archive, the one that was begun: it holds every event that the newest check saw.
create function outbox.record_archive(day date, lease bigint, address text, hash text, events bigint) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
begin
    perform outbox.renew_retention(lease);
    update outbox.day d
       set archived_to = address, sha256 = hash, events = record_archive.events, writing_to = null,
           archived_snapshot = d.checked_snapshot, archived_before = d.checked_before, archived_on = d.checked_on
     where d.day = record_archive.day and d.emptied_at is null and d.checked_snapshot is not null
       and d.writing_to = address;
    if not found then
        raise exception 'day % has no check that the archive could belong to, or no archive % was begun', day, address
            using errcode = 'object_not_in_prerequisite_state';
    end if;
end
$$;

-- Empty a day that was checked: "emptied"; "again" when something has changed since the check; "locked" if a lock was
-- not granted, or not for long enough; "archive" when it must be archived first. Of the DEFAULT partition up to 1,000
-- events are deleted, and "more" says that some are left.
--
-- Nothing is waited for longer than 50 ms. First it locks the row of the configuration, which every change of a sink's
-- positions raises, then the partition. Under the lock only what came since the check is looked for, by an index. The
-- lock is given up after 100 ms. A COMMIT that waited for a standby would keep it: this one does not wait. Nor does a
-- block of a session keep it: this must be a transaction of its own.
create function outbox.empty_day(day date, lease bigint, events bigint) returns text
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
                                         (select r.actor from outbox.retention r), null);
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
                                 (select r.actor from outbox.retention r), null);
    return 'emptied';
end
$$;

-- Remove the oldest empty partition that ended more than a day ago and is past keep_days, and return its day; null
-- when there is none, or when its lock was not granted within 50 ms. Every emit waits behind this one meanwhile.
create function outbox.drop_day(lease bigint) returns date
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
        raise exception 'outbox.drop_day must be a transaction of its own, which ends at once'
            using errcode = 'invalid_transaction_state';
    end if;
    perform outbox.renew_retention(lease);
    select p.part, p.day into oldest
      from outbox.partitions() p
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

-- ---------------------------------------------------------------------------------------------------------
-- Uids, dead letters and recorded attempts
-- ---------------------------------------------------------------------------------------------------------

-- Look at the next `most` uids that callers chose, in their order, and remove those that are past keep_uids_days and that
-- no event of the log or row of `delivery` has. `removed` counts them; `left_over` says that the lap is not over. It begins
-- again an hour after its end.
create function outbox.trim_uids(lease bigint, most integer, out removed integer, out left_over boolean)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
declare
    t outbox.retention;
    cutoff timestamptz;
    last_uid uuid;
    looked integer;
begin
    perform outbox.renew_retention(lease);
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
       and not exists (select from outbox.event e where e.uid = u.uid)
       and not exists (select from outbox.delivery d where d.uid = u.uid);
    get diagnostics removed = row_count;
    left_over := looked = most;
    update outbox.retention r
       set uid_cursor = case when left_over then last_uid end,
           uid_lap_at = case when left_over then r.uid_lap_at else clock_timestamp() end;
end
$$;

-- Look at the next `most` dead rows, in the order of sinks and ids, and discard those that died more than keep_dead_days ago,
-- each with a mark. Rows whose events would be read again (see outbox.discard_rows) are left for the next lap. `removed`
-- counts; `left_over` says that the lap is not over. A lap is one row of the audit, once something was discarded.
--
-- Shards are locked before the positions are read, as in outbox.discard_deliveries: call it in a transaction of its own.
create function outbox.discard_expired(lease bigint, most integer, out removed integer, out left_over boolean)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set lock_timeout = '2s'
as $$
declare
    t outbox.retention;
    cutoff timestamptz;
    looked_at bigint[];
    sinks text[];
    free_ids bigint[];
    free_sinks text[];
    reason_text text;
begin
    perform outbox.require_read_committed('outbox.discard_expired'), outbox.end_when_idle();
    perform outbox.renew_retention(lease);
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
    perform outbox.lock_shards_of(array_agg(d.id), array_agg(d.sink))
       from unnest(looked_at, sinks) w (id, sink)
       join outbox.delivery d on d.id = w.id and d.sink = w.sink
      where outbox.died_before(d, cutoff);
    select array_agg(l.id), array_agg(l.sink) into free_ids, free_sinks
      from (
        select d.id, d.sink
          from unnest(looked_at, sinks) w (id, sink)
          join outbox.delivery d on d.id = w.id and d.sink = w.sink
         where outbox.died_before(d, cutoff)
         order by d.sink, d.id
           for update of d skip locked
      ) l;
    select r.done into removed from outbox.discard_rows(free_ids, free_sinks, t.actor, reason_text) r;
    left_over := coalesce(cardinality(looked_at) = most, false);
    if removed > 0 then
        t.dead_audit := outbox.record_action(
            'retention dead', null, jsonb_build_object('keep_dead_days', t.keep_dead_days), removed, t.actor, reason_text,
            (select a.id from outbox.audit a
              where a.id = t.dead_audit and a.actor is not distinct from t.actor and a.reason = reason_text
                and a.role_name = outbox.emitter() and a.login = session_user
                and a.at > clock_timestamp() - interval '1 hour'));
    end if;
    update outbox.retention r
       set dead_cursor_sink = case when left_over then sinks[most] end,
           dead_cursor_id = case when left_over then looked_at[most] end,
           dead_audit = case when left_over then t.dead_audit end;
end
$$;

-- True if a row has been dead since before a time. Rows that died under version 2 may have an old `since`.
create function outbox.died_before(d outbox.delivery, cutoff timestamptz) returns boolean
language sql volatile
return d.state = 'dead' and (d.lease_until is null or d.lease_until <= clock_timestamp())
   and greatest(d.since, d.last_attempt_at, case when d.due_at <= clock_timestamp() then d.due_at end) < cutoff;

-- Remove recorded attempts that are older than keep_attempts_days, a step at a time: the oldest partition that ended before
-- then, or up to 1,000 rows of the DEFAULT partition. `removed` counts partitions or rows; 0 means that none is left.
--
-- Dropping a partition waits for settlements that have written attempts, each a short transaction, and later ones wait
-- behind it: for 50 ms at most, after which it fails and is tried again later.
create function outbox.trim_attempts(lease bigint) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
as $$
declare
    t outbox.retention;
    keep_from timestamptz;
    part text;
    removed integer;
begin
    perform outbox.renew_retention(lease);
    select * into t from outbox.retention;
    keep_from := clock_timestamp() - make_interval(days => t.keep_attempts_days);
    if t.keep_attempts_days = 0 or t.hold_until > clock_timestamp() then
        return 0;
    end if;
    perform from outbox.chore c where c.name = 'attempts' for update skip locked;
    if not found then
        return 0;
    end if;
    select c.relname into part
      from pg_inherits i join pg_class c on c.oid = i.inhrelid
     where i.inhparent = 'outbox.attempt'::regclass and c.relname ~ '^attempt_[0-9]{8}$'
       and to_date(right(c.relname, 8), 'YYYYMMDD') + 1 <= keep_from
     order by c.relname
     limit 1;
    if part is not null then
        execute format('drop table outbox.%I', part);
        return 1;
    end if;
    delete from outbox.attempt_default d
     where d.ctid = any (array(select o.ctid from outbox.attempt_default o where o.at < keep_from order by o.at limit 1000));
    get diagnostics removed = row_count;
    return removed;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Status and partitions
-- ---------------------------------------------------------------------------------------------------------

-- The policy, and each day that has events or was emptied (the newest 400 of those), as JSON. What keeps a day that is
-- past keep_days is as of the last pass, or as of now if `live`. `idle` says that no pass runs or has begun lately. `events` of a day that is not emptied is an estimate.
create function outbox.retention_status(live boolean default false) returns jsonb
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
    with due as (select d.day, d.before from outbox.past_days() d),
    known as (
        select p.day, c.part,
               case when x.relname is not null and c.archived_to is null
                    then greatest(x.reltuples, pg_stat_get_live_tuples(x.oid))::bigint else c.events end as events,
               pg_total_relation_size(x.oid) as bytes, c.archived_to, null::timestamptz as emptied_at,
               case when due.day is null then '[]'
                    when live then outbox.kept_since(outbox.day_keepers(p.day, due.before), coalesce(c.kept_by, '[]'))
                    else coalesce(c.kept_by, '[]') end as kept_by,
               case when due.day is not null then c.left_because end as left_because,
               case when due.day is not null then c.left_at end as left_at,
               due.day is not null as due,
               case when due.day is not null and isfinite(p.upto)
                    then extract(epoch from clock_timestamp() - p.upto - make_interval(days => t.keep_days)) end as due_seconds
          from outbox.partitions() p
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
        'keep_days', t.keep_days, 'keep_uids_days', t.keep_uids_days, 'keep_dead_days', t.keep_dead_days,
        'keep_attempts_days', t.keep_attempts_days, 'archive', t.archive, 'lower_since', t.lower_since,
        'last_pass', worked,
        'idle', coalesce(worked < clock_timestamp() - interval '15 minutes', true)
                and coalesce(t.lease_until < clock_timestamp(), true),
        'hold_until', case when t.hold_until > clock_timestamp() then t.hold_until end, 'days', days);
end
$$;

-- Record the table [retention] of a relay's file; null: it has none. It is an object of `archive`, a boolean, and of days,
-- whole numbers from 0 to 36500; other names are ignored.
create function outbox.state_retention(relay_id uuid, said jsonb) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    wrong text;
begin
    select n.name into wrong
      from unnest('{keep_days, keep_uids_days, keep_dead_days, keep_attempts_days, archive}'::text[]) n (name)
     where jsonb_typeof(said) is distinct from 'object'
        or case when n.name = 'archive' then jsonb_typeof(said -> n.name) is distinct from 'boolean'
                when jsonb_typeof(said -> n.name) is distinct from 'number' then true
                else said ->> n.name !~ '^[0-9]{1,5}$' or (said ->> n.name)::numeric > 36500 end
     limit 1;
    if wrong is not null and said is not null then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('%s must be %s, not %s', wrong,
                             case when wrong = 'archive' then 'true or false' else 'a whole number of days from 0 to 36500' end,
                             coalesce(case when jsonb_typeof(said) = 'object' then said ->> wrong end, 'missing'));
    end if;
    update outbox.relay r set retention = said where r.id = relay_id;
    return found;
end
$$;

-- Makes the partitions (UTC) that are missing from today to `days_ahead` days ahead, and returns how many. Each has one
-- day, or with more than 31 days of retention a fourteenth of them, at most 31 (as it has where events are kept
-- indefinitely): every attached partition makes each read a little slower. Those that exist stay as they are.
-- They begin above the newest row of the DEFAULT partition, so that attaching finds nothing to move.
-- SECURITY DEFINER because only the owner of the log may attach: the relay's role is not that. Default privileges of
-- the owner give nothing away, and nothing that the caller has set decides where or how a table is made.
create or replace function outbox.make_partitions(days_ahead integer default 3) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
set default_tablespace = ''
set default_table_access_method = 'heap'
as $$
declare
    today timestamp := date_trunc('day', clock_timestamp() at time zone 'UTC');
    span constant integer := (
        select case when r.keep_days > 31 then least(r.keep_days / 14, 31)
                    when r.keep_days = 0 and r.stated then 31 else 1 end
          from outbox.retention r);
    newest timestamptz;
    begins timestamp;
    upto timestamp;
    part text;
    role text;
    made integer := 0;
begin
    perform from outbox.chore c where c.name = 'partitions' for update skip locked;
    if not found then
        return 0;
    end if;
    for begins in select today + n * interval '1 day' from generate_series(0, least(greatest(days_ahead, 1), 30)) n loop
        part := 'event_' || to_char(begins, 'YYYYMMDD');
        continue when to_regclass('outbox.' || part) is not null;
        continue when exists (select from outbox.partitions() p
                               where p.day <> '-infinity' and p.day <= begins and p.upto > begins at time zone 'UTC');
        select max(created_at) into newest from outbox.event_default;
        continue when newest >= begins at time zone 'UTC';
        upto := least(begins + span * interval '1 day',
                      (select min(p.day)::timestamp from outbox.partitions() p where p.day > begins));
        execute format('create table outbox.%I (like outbox.event including defaults including generated)', part);
        perform outbox.keep_no_statistics(to_regclass('outbox.' || part), '{key, payload, headers}');
        for role in
            select distinct case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end
              from pg_class c cross join lateral aclexplode(c.relacl) a
             where c.oid = ('outbox.' || part)::regclass and a.grantee <> c.relowner
        loop
            execute format('revoke all on table outbox.%I from %s cascade', part, role);
        end loop;
        execute format('alter table outbox.event attach partition outbox.%I for values from (%L) to (%L)',
                       part, begins at time zone 'UTC', upto at time zone 'UTC');
        made := made + 1;
    end loop;
    return made;
end
$$;

-- As in version 2. No archive and no check counts behind it: events that came since would be told from those before by
-- numbers that mean nothing any more. Relays of version 2 do not know marks of discarded events, and deliver them once
-- positions are set back: they are refused when there are any.
create or replace function outbox.rebase() returns bigint
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
    perform outbox.record_action('rebase', null, jsonb_build_object('floor', new_floor), 1, null, null);
    return new_floor;
end
$$;
