-- The inbox: which events a consumer has handled, if it keeps its data in this database. Relays made for version 2 work on
-- this schema: they remove no old marks.

-- ---------------------------------------------------------------------------------------------------------
-- Marks
-- ---------------------------------------------------------------------------------------------------------

-- A mark for each event that a consumer has handled, written in the transaction that has the effect. The primary key lets
-- one transaction at a time have it, so an event has one effect, whenever and however often it comes.
--
-- The table is not partitioned. Partitions by the time of the handling could not be unique over all days, so an event that
-- comes again after midnight would have its effect again. Partitions by the time in a uid of version 7 would drop marks
-- too early: a replay, or a dead letter that is retried, writes its mark into a day that is due to be dropped. A caller
-- chooses any time for a uid, uids of other versions have none, and to drop a partition waits for every open consumer and
-- holds up all others. Old marks are deleted in small steps instead.
create table outbox.inbox (
    consumer text collate "C" not null,
    uid uuid not null,
    handled_at timestamptz not null default clock_timestamp(),
    primary key (consumer, uid)
);
create index inbox_handled_at on outbox.inbox (handled_at);
comment on table outbox.inbox is 'The events that each consumer has handled. Call outbox.once to add one.';

-- Mark an event as handled by a consumer. True: this is the first time, and the caller's effect belongs into this
-- transaction. False: it was handled before. While another transaction has the mark, the call waits for its end: it returns
-- false after a commit, and true after a rollback. In a WHERE clause it would be called for each row, and again for a row
-- that another transaction has changed meanwhile.
create function outbox.once(consumer text, uid uuid) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if consumer is null or uid is null then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('outbox.once: %s must not be null', case when uid is null then 'uid' else 'consumer' end);
    end if;
    if octet_length(consumer) not between 1 and 255 then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('outbox.once: consumer must have 1 to 255 bytes, not %s', octet_length(consumer));
    end if;
    insert into outbox.inbox (consumer, uid) values (once.consumer, once.uid) on conflict do nothing;
    return found;
end
$$;

-- Kinds of grantees; `consume` is for applications that call outbox.once.
alter table outbox.grantee drop constraint grantee_kind_check;
alter table outbox.grantee add constraint grantee_kind_check
    check (kind in ('emit', 'consume', 'relay', 'read', 'operate', 'payloads'));

-- ---------------------------------------------------------------------------------------------------------
-- Retention
-- ---------------------------------------------------------------------------------------------------------

-- As in version 16, and true too if the inbox has a mark that is past a lower number of days for uids.
create or replace function outbox.is_past(asked jsonb, kept jsonb) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select coalesce((select e.created_at from outbox.event e order by e.id limit 1)
                    < clock_timestamp() - make_interval(days => min(n.days)), false)
           or exists (select from outbox.inbox i
                       where i.handled_at < clock_timestamp() - make_interval(days => min(n.days) filter (where n.of_uids)))
      from (
        select (asked ->> f.name)::integer as days, f.name = 'keep_uids_days' as of_uids
          from unnest('{keep_days, keep_uids_days, keep_dead_days, keep_attempts_days}'::text[]) f (name)
         where outbox.asks_less(jsonb_build_object(f.name, asked -> f.name), jsonb_build_object(f.name, kept -> f.name))
      ) n
$$;

alter table outbox.retention add column inbox_cursor timestamptz, add column inbox_lap_at timestamptz;
comment on column outbox.retention.inbox_cursor is
    'The time of the last mark that was looked at; null: the next one is the first, an hour after inbox_lap_at.';

-- Look at the next `most` marks that are older than keep_uids_days, in the order of their times, and remove those whose
-- event cannot come again: it is neither in the log nor in a row of outbox.delivery. `removed` counts; `left_over` says that
-- the lap is not over. Marks that are kept are looked at once in a lap.
create function outbox.trim_inbox(lease bigint, most integer, out removed integer, out left_over boolean)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
declare
    t outbox.retention;
    cutoff timestamptz;
    last_at timestamptz;
    looked integer;
begin
    perform outbox.renew_retention(lease);
    most := least(greatest(coalesce(most, 1000), 1), 1000);
    select * into t from outbox.retention;
    removed := 0;
    left_over := false;
    if t.keep_uids_days = 0 or t.hold_until > clock_timestamp()
       or (t.inbox_cursor is null and t.inbox_lap_at > clock_timestamp() - interval '1 hour'
           and t.inbox_lap_at <= clock_timestamp()) then
        return;
    end if;
    cutoff := clock_timestamp() - make_interval(days => t.keep_uids_days);
    select count(*), max(n.handled_at) into looked, last_at
      from (select i.handled_at from outbox.inbox i
             where i.handled_at < cutoff and (t.inbox_cursor is null or i.handled_at > t.inbox_cursor)
             order by i.handled_at limit most) n;
    delete from outbox.inbox i
     where i.handled_at <= last_at and (t.inbox_cursor is null or i.handled_at > t.inbox_cursor)
       and not exists (select from outbox.event e where e.uid = i.uid)
       and not exists (select from outbox.delivery d where d.uid = i.uid);
    get diagnostics removed = row_count;
    left_over := looked = most;
    update outbox.retention r
       set inbox_cursor = case when left_over then last_at end,
           inbox_lap_at = case when left_over then r.inbox_lap_at else clock_timestamp() end;
end
$$;
