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
-- (`migrate --max-payload-bytes`). A constant, which takes the place of every call when a statement is planned. Not
-- IMMUTABLE: then plans that sessions keep would not be made again when the constant changes.
create function outbox.payload_ceiling() returns integer
language sql stable parallel safe
return 1048576;

-- ---------------------------------------------------------------------------------------------------------
-- emit
-- ---------------------------------------------------------------------------------------------------------

-- The ceiling begins with the largest limit that a role, the database or the server had until now: what could be
-- emitted can still be emitted.
do $$
declare
    most constant integer := 67108864;
    largest bigint := (
        select max(t.text::bigint)
          from (select current_setting('outbox.max_payload_bytes', true) as text
                union all
                select split_part(c.setting, '=', 2)
                  from pg_db_role_setting s
                 cross join unnest(s.setconfig) c (setting)
                 where s.setdatabase in (0, (select d.oid from pg_database d where d.datname = current_database()))
                   and c.setting like 'outbox.max\_payload\_bytes=%') t
         where t.text ~ '^[0-9]{1,9}$'
    );
begin
    if largest > outbox.payload_ceiling() then
        execute format('create or replace function outbox.payload_ceiling() returns integer '
                       'language sql stable parallel safe return %s', least(largest, most));
        raise notice 'payloads may have at most % bytes, from the largest outbox.max_payload_bytes that is set (%): '
                     'from now on that setting only lowers the limit', least(largest, most), largest;
    end if;
end
$$;

-- Describe a text by its first wrong character: "a b" has " " at character 2. `wrong` is a regular expression that one
-- wrong character matches. Characters that cannot be shown are written as code points.
create function outbox.shown(value text, wrong text) returns text
language sql immutable
return (
    select format(
               '"%s" has %s at character %s',
               regexp_replace(left(value, 60) collate "C", '[^\x20-\x7e]', '?', 'g'),
               case when found.letter collate "C" ~ '^[\x20-\x7e]$' then '"' || found.letter || '"'
                    else 'U+' || lpad(upper(to_hex(ascii(found.letter))), 4, '0') end,
               found.place)
      from (select c.letter, c.place
              from regexp_split_to_table(value, '') with ordinality c (letter, place)
             where c.letter collate "C" ~ wrong
             order by c.place
             limit 1) found
);

-- What is wrong with a header mapping, or null. Names are HTTP tokens (RFC 9110, 5.6.2).
create or replace function outbox.header_fault(headers jsonb) returns text
language plpgsql immutable
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
declare
    name text;
    value jsonb;
begin
    if jsonb_typeof(headers) <> 'object' then
        return format('headers must be a JSON object of strings, not %s', jsonb_typeof(headers));
    end if;
    if octet_length(headers::text) > 16384 then
        return format('headers must have at most 16384 bytes as JSON; these have %s', octet_length(headers::text));
    end if;
    for name, value in select * from jsonb_each(headers) loop
        if length(name) not between 1 and 255 then
            return format('a header name must have 1 to 255 characters; this one has %s', length(name));
        end if;
        if name collate "C" ~ '[^A-Za-z0-9!#$%&''*+.^_`|~-]' then
            return format('a header name must be a token of letters, digits and !#$%%&''*+-.^_`|~; %s',
                          outbox.shown(name, '[^A-Za-z0-9!#$%&''*+.^_`|~-]'));
        end if;
        if jsonb_typeof(value) <> 'string' then
            return format('the value of header "%s" must be a string, not %s', name, jsonb_typeof(value));
        end if;
        if (value #>> '{}') ~ '[\x01-\x08\x0a-\x1f\x7f]' then
            return format('the value of header "%s" must have no control character but a tab; it has U+%s at character %s',
                          name,
                          lpad(upper(to_hex(ascii(substring(value #>> '{}' from '[\x01-\x08\x0a-\x1f\x7f]')))), 4, '0'),
                          length(substring(value #>> '{}' from '^[^\x01-\x08\x0a-\x1f\x7f]*')) + 1);
        end if;
    end loop;
    return null;
end
$$;

-- What is wrong with an event, as a message, or null. `most` is the setting `outbox.max_payload_bytes` or null, which
-- only lowers the ceiling; `outbox.event_index` is set by statements that emit many events, and says which was refused.
--
-- A regular expression with a bound such as {1,255} costs as much as the rest: lengths are compared. The caller's
-- collation may be one that regular expressions refuse: they are told theirs.
create or replace function outbox.event_fault(
    type text, payload bytea, key text, headers jsonb, deliver_at timestamptz, content_type text, most text
) returns text
language sql stable
return 'outbox.emit: ' || coalesce('event ' || nullif(current_setting('outbox.event_index', true), '') || ': ', '') || case
    when type is null or length(type) not between 1 and 255 then
        format('type must be 1 to 255 visible ASCII characters without space and "*"; this one has %s',
               coalesce(length(type)::text || ' characters', 'no value'))
    when type collate "C" ~ '[^\x21-\x29\x2b-\x7e]' then
        format('type must be 1 to 255 visible ASCII characters without space and "*"; %s',
               outbox.shown(type, '[^\x21-\x29\x2b-\x7e]'))
    when payload is null then
        'payload must not be null'
    when most is not null and (length(most) > 9 or most collate "C" ~ '[^0-9]') then
        'the setting outbox.max_payload_bytes must be a number of bytes, below 1000000000'
    when octet_length(payload) > outbox.payload_ceiling() then
        format('payload must have at most %s bytes (the ceiling: see outbox-relay migrate --max-payload-bytes); '
               'this one has %s', outbox.payload_ceiling(), octet_length(payload))
    when octet_length(payload) > most::integer then
        format('payload must have at most %s bytes (setting outbox.max_payload_bytes); this one has %s',
               most, octet_length(payload))
    when octet_length(key) > 1024 then
        format('key must have at most 1024 bytes; this one has %s', octet_length(key))
    when content_type is null or length(content_type) not between 1 and 255 then
        format('content_type must be 1 to 255 printable ASCII characters; this one has %s',
               coalesce(length(content_type)::text || ' characters', 'no value'))
    when content_type collate "C" ~ '[^\x20-\x7e]' then
        format('content_type must be 1 to 255 printable ASCII characters; %s',
               outbox.shown(content_type, '[^\x20-\x7e]'))
    when deliver_at not between '0001-01-01 00:00:00+00' and '9998-12-31 23:59:59.999999+00' then
        format('deliver_at must be in the years 1 to 9998 (UTC); this one is %s', deliver_at)
    when headers is not null then
        outbox.header_fault(headers)
end;

-- Whether an event is as most are, and so has no fault. What it is silent about, event_fault looks at.
--
-- One expression, which takes the place of its call when emit is planned: an emit runs in a transaction of the
-- application. PostgreSQL makes every expression ready again in each transaction, at a price for each function in it,
-- which for all of event_fault is as much as half of the INSERT.
create or replace function outbox.is_usual(
    type text, payload bytea, key text, headers jsonb, deliver_at timestamptz, content_type text
) returns boolean
language sql stable
return headers is null and deliver_at is null
       and octet_length(type) <= 255 and type collate "C" ~ '^[\x21-\x29\x2b-\x7e]+$'
       and octet_length(payload) <= outbox.payload_ceiling()
       and coalesce(current_setting('outbox.max_payload_bytes', true), '') = ''
       and (key is null or octet_length(key) <= 1024)
       and content_type in ('application/json', 'application/octet-stream');

-- The role that emits: the session's, or the one that it took with SET ROLE, which needs a membership. A function of the
-- application that is SECURITY DEFINER changes neither.
create function outbox.emitter() returns text
language sql stable
return coalesce(nullif(current_setting('role'), 'none'), session_user::text);

-- Record a uid that a caller chose. True: it is new, so its event is to be emitted. False: this role has used it
-- before, and nothing is to be emitted. A uid that another role has used is refused by name.
--
-- Uids of version 7 may be those that emit makes, which leave no row in outbox.uid: they are looked for in the log,
-- near the time that they hold. The query is planned with its values and without computing on them, which leaves out
-- all other days: no partition is locked that emptying the log might wait for.
create function outbox.claim_uid(claimed uuid, claimant text) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
as $$
declare
    other text;
    made_at timestamptz;
    earliest timestamptz;
    latest timestamptz;
    is_new boolean;
begin
    -- A row that was there may be deleted before it is read.
    for attempt in 1..3 loop
        insert into outbox.uid (uid, emitter) values (claimed, claimant) on conflict do nothing;
        is_new := found;
        exit when is_new;
        select u.emitter into other from outbox.uid u where u.uid = claimed;
        exit when found;
        if attempt = 3 then
            raise exception using errcode = 'serialization_failure',
                message = format('uid %s was removed while it was looked at: try again', claimed);
        end if;
    end loop;
    if is_new and get_byte(uuid_send(claimed), 6) >> 4 = 7 then
        made_at := to_timestamp(('x' || encode(substring(uuid_send(claimed) from 1 for 6), 'hex'))::bit(48)::bigint / 1000.0);
        earliest := made_at - interval '10 minutes';
        latest := made_at + interval '10 minutes';
        select e.emitter into other
          from outbox.event e
         where e.uid = claimed and e.emitter <> claimant and e.created_at >= earliest and e.created_at <= latest
         limit 1;
    end if;
    if other <> claimant then
        raise exception using errcode = 'invalid_parameter_value',
            message = format(
                'outbox.emit: %suid %s was emitted by role "%s", and this is role "%s": a uid belongs to the role that '
                'used it first',
                coalesce('event ' || nullif(current_setting('outbox.event_index', true), '') || ': ', ''),
                claimed, other, claimant);
    end if;
    return is_new;
end
$$;

-- Emits one event. `outbox.wake` is a setting for those who prepare transactions, which may not have notified anybody.
create or replace function outbox.emit_raw(
    type text,
    payload bytea,
    key text default null,
    headers jsonb default null,
    deliver_at timestamptz default null,
    uid uuid default null,
    content_type text default 'application/octet-stream'
) returns uuid
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    fault text;
begin
    if outbox.is_usual(type, payload, key, headers, deliver_at, content_type) is not true then
        fault := outbox.event_fault(type, payload, key, headers, deliver_at, content_type,
                                    nullif(current_setting('outbox.max_payload_bytes', true), ''));
        if fault is not null then
            raise exception using errcode = 'invalid_parameter_value', message = fault;
        end if;
    end if;
    if uid is null then
        uid := outbox.uuid7();
    elsif not outbox.claim_uid(uid, outbox.emitter()) then
        return uid;
    end if;
    insert into outbox.event (uid, type, key, payload, content_type, headers, deliver_at, emitter)
    values (uid, type, key, payload, content_type, headers, deliver_at, outbox.emitter());
    if outbox.asleep() then
        if current_setting('outbox.wake', true) is distinct from 'off' then
            perform pg_notify('outbox', '');
        end if;
    end if;
    return uid;
end
$$;

-- The same for JSON. It has a body of its own: a call within the call costs the application some microseconds more.
create or replace function outbox.emit(
    type text,
    payload jsonb,
    key text default null,
    headers jsonb default null,
    deliver_at timestamptz default null,
    uid uuid default null
) returns uuid
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    body bytea := convert_to(payload::text, 'UTF8');
    fault text;
begin
    if outbox.is_usual(type, body, key, headers, deliver_at, 'application/json') is not true then
        fault := outbox.event_fault(type, body, key, headers, deliver_at, 'application/json',
                                    nullif(current_setting('outbox.max_payload_bytes', true), ''));
        if fault is not null then
            raise exception using errcode = 'invalid_parameter_value', message = fault;
        end if;
    end if;
    if uid is null then
        uid := outbox.uuid7();
    elsif not outbox.claim_uid(uid, outbox.emitter()) then
        return uid;
    end if;
    insert into outbox.event (uid, type, key, payload, content_type, headers, deliver_at, emitter)
    values (uid, type, key, body, 'application/json', headers, deliver_at, outbox.emitter());
    if outbox.asleep() then
        if current_setting('outbox.wake', true) is distinct from 'off' then
            perform pg_notify('outbox', '');
        end if;
    end if;
    return uid;
end
$$;

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

-- Kinds of grantees; `read`, `operate` and `payloads` are for those who look and act.
alter table outbox.grantee drop constraint grantee_kind_check;
alter table outbox.grantee add constraint grantee_kind_check
    check (kind in ('emit', 'relay', 'read', 'operate', 'payloads'));

-- What one session does at a time: it locks the row. An advisory lock could be taken by every role of the database.
create table outbox.chore (
    name text primary key
);
insert into outbox.chore (name) values ('partitions');

-- Makes the daily partitions (UTC) that are missing from today to `days_ahead` days ahead, and returns how many.
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
    newest timestamptz;
    day timestamp;
    part text;
    role text;
    made integer := 0;
begin
    perform from outbox.chore c where c.name = 'partitions' for update skip locked;
    if not found then
        return 0;
    end if;
    for day in select today + n * interval '1 day' from generate_series(0, least(greatest(days_ahead, 1), 30)) n loop
        part := 'event_' || to_char(day, 'YYYYMMDD');
        continue when to_regclass('outbox.' || part) is not null;
        select max(created_at) into newest from outbox.event_default;
        continue when newest >= day at time zone 'UTC';
        execute format('create table outbox.%I (like outbox.event including defaults including generated)', part);
        for role in
            select distinct case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end
              from pg_class c cross join lateral aclexplode(c.relacl) a
             where c.oid = ('outbox.' || part)::regclass and a.grantee <> c.relowner
        loop
            execute format('revoke all on table outbox.%I from %s cascade', part, role);
        end loop;
        execute format('alter table outbox.event attach partition outbox.%I for values from (%L) to (%L)',
                       part, day at time zone 'UTC', (day + interval '1 day') at time zone 'UTC');
        made := made + 1;
    end loop;
    return made;
end
$$;

-- In a new schema the first version of it made nothing while another session held its lock.
do $$
begin
    if (select count(*) from pg_inherits i where i.inhparent = 'outbox.event'::regclass) = 1 then
        perform outbox.make_partitions();
    end if;
end
$$;

-- Refuse to leave a shard of a sink without a position: relays would deliver nothing of it. What the owner does, its
-- functions among it, is not looked at: a rebase writes positions anew.
create function outbox.keep_positions() returns trigger
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    lost record;
begin
    if pg_has_role(current_user, (select c.relowner from pg_class c where c.oid = tg_relid), 'usage') then
        return null;
    end if;
    select count(*) as shards, min(l.sink) as sink into lost
      from (
        select g.sink, u.shard from gone g cross join lateral unnest(g.shards) u (shard)
         where exists (select from outbox.sink k where k.name = g.sink)
        except
        select p.sink, u.shard from outbox.progress p cross join lateral unnest(p.shards) u (shard)
      ) l;
    if lost.shards > 0 then
        raise exception using errcode = 'restrict_violation',
            message = format('%s shards would have no position, of sink %s among others: nothing of them would be delivered',
                             lost.shards, quote_ident(lost.sink)),
            hint = 'Only positions that newer ones outrank may be deleted.';
    end if;
    return null;
end
$$;

create trigger keep_positions after delete on outbox.progress
    referencing old table as gone for each statement execute function outbox.keep_positions();

-- A relay registers its sinks; it cannot write them in another way.
alter function outbox.register_sinks security definer;
