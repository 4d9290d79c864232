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

-- ---------------------------------------------------------------------------------------------------------
-- Sinks, positions and rebase
-- ---------------------------------------------------------------------------------------------------------

-- ---------------------------------------------------------------------------------------------------------
-- Partitions
-- ---------------------------------------------------------------------------------------------------------
