-- Odd input, restores and other people's privileges: what an event, a role or a restored cluster may be, and what
-- becomes of it. Relays made for version 1 work on this schema.

-- ---------------------------------------------------------------------------------------------------------
-- Columns and the ceiling
-- ---------------------------------------------------------------------------------------------------------

-- Only rises; raised with every change of what relays are to read. A tick carries it.
alter table outbox.meta add column config bigint not null default 1;
comment on column outbox.meta.config is
    'Counts changes of the configuration and of positions. It only rises, so no older tick can look like a newer one.';
alter table outbox.meta add column system_identifier bigint;
comment on column outbox.meta.system_identifier is
    'The cluster whose transaction numbers the log carries: see outbox.rebase.';
update outbox.meta
   set config = 1 + (select coalesce(max(s.generation), 0) + coalesce(sum(s.generation), 0) from outbox.sink s),
       system_identifier = (select c.system_identifier from pg_control_system() c);

alter table outbox.event add column emitter text;
comment on column outbox.event.emitter is 'The role that emitted the event; null in events of schema version 1.';
alter table outbox.uid add column emitter text;

-- The largest payload in bytes that an event may have. Only the owner of the schema can replace this function
-- (`migrate --max-payload-bytes`). A constant, which takes the place of every call when a statement is planned.
create function outbox.payload_ceiling() returns integer
language sql immutable parallel safe
return 1048576;

-- ---------------------------------------------------------------------------------------------------------
-- emit
-- ---------------------------------------------------------------------------------------------------------

-- ---------------------------------------------------------------------------------------------------------
-- Reading
-- ---------------------------------------------------------------------------------------------------------

-- ---------------------------------------------------------------------------------------------------------
-- Settling and claims of rows
-- ---------------------------------------------------------------------------------------------------------

-- ---------------------------------------------------------------------------------------------------------
-- Ticks and servers
-- ---------------------------------------------------------------------------------------------------------

-- A restart after the crash of one process changes neither the postmaster's start nor the timeline. But it empties what
-- is not logged, so a mark kept there is gone. Statistics are reset by people too. PostgreSQL 14 has no such sequences.
do $server_mark$
begin
    execute format('create %s sequence outbox.server_mark',
                   case when current_setting('server_version_num')::integer >= 150000 then 'unlogged' end);
end
$server_mark$;
comment on sequence outbox.server_mark is
    'A random number that a crash of the server takes away: a part of outbox.incarnation, given by outbox.arm.';

-- Marks the server, if it has no mark: neither on PostgreSQL 14, nor before the first call after a crash. Setting the
-- value takes no transaction number and writes no WAL. The row that is locked meanwhile is one that only the relays and
-- the schema's owner may lock, so that nobody else can keep a relay waiting here.
create function outbox.arm() returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if current_setting('server_version_num')::integer < 150000
       or pg_sequence_last_value('outbox.server_mark') is not null then
        return;
    end if;
    perform from outbox.meta for update;
    if (select c.relpersistence from pg_class c where c.oid = 'outbox.server_mark'::regclass) <> 'u' then
        execute 'alter sequence outbox.server_mark set unlogged';  -- it comes from PostgreSQL 14, by pg_upgrade
    end if;
    if pg_sequence_last_value('outbox.server_mark') is null then
        perform setval('outbox.server_mark', 1 + ('x' || left(md5(gen_random_uuid()::text), 15))::bit(60)::bigint);
    end if;
end
$$;

create or replace function outbox.incarnation() returns text
language sql stable
return concat_ws(
    '/',
    extract(epoch from pg_postmaster_start_time()),
    left(pg_walfile_name(pg_current_wal_lsn()), 8),
    case when current_setting('server_version_num')::integer >= 150000
         then pg_sequence_last_value('outbox.server_mark') end
);

select outbox.arm();

-- ---------------------------------------------------------------------------------------------------------
-- Sinks, positions and rebase
-- ---------------------------------------------------------------------------------------------------------

-- ---------------------------------------------------------------------------------------------------------
-- Partitions
-- ---------------------------------------------------------------------------------------------------------
