-- Odd input, restores and other people's privileges: what an event, a role or a restored cluster may be, and what
-- becomes of it. Relays made for version 1 work on this schema.

-- ---------------------------------------------------------------------------------------------------------
-- Columns and the ceiling
-- ---------------------------------------------------------------------------------------------------------

-- Every table that changes is locked before anything does. Applications and relays lock these tables in several orders
-- and wait behind this lock. So that none of them is ended by a deadlock, a try takes less than `deadlock_timeout`, and
-- everything is given back between two tries. The log comes first: the transactions of applications hold it for long.
do $$
declare
    tries constant integer := 10;
    patience constant integer := (select s.setting::integer from pg_settings s where s.name = 'deadlock_timeout');
    lock_timeout_before constant text := current_setting('lock_timeout');
begin
    for attempt in 1..tries loop
        begin
            perform set_config('lock_timeout', greatest(patience / 2, 1)::text, true);
            lock table outbox.event in access exclusive mode;
            perform set_config('lock_timeout', greatest(patience / 20, 1)::text, true);
            lock table outbox.sink, outbox.meta, outbox.uid, outbox.delivery, outbox.progress, outbox.grantee
                in access exclusive mode;
            exit;
        exception when lock_not_available or deadlock_detected then
            if attempt = tries then
                raise;
            end if;
        end;
        perform pg_sleep(patience / 10000.0);
    end loop;
    perform set_config('lock_timeout', lock_timeout_before, true);
end
$$;

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

-- The fault of a header mapping, or null. Names are HTTP tokens (RFC 9110, 5.6.2).
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

-- The fault of an event, as a message, or null. `most` is the setting `outbox.max_payload_bytes` or null, which
-- only lowers the ceiling; `outbox.event_index` is set by statements that emit many events, and says which was refused.
--
-- A regular expression with a bound such as {1,255} costs as much as the rest: lengths are compared. The caller's
-- collation may be one that regular expressions refuse: they get their own.
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

-- True if an event is as most are, and so has no fault. What it is silent about, event_fault looks at.
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

-- The functions that read the log have a new last argument, `most_payload`: the largest payload in bytes that the
-- caller can take. Null is what relays of version 1 say: then nothing below applies.
--
-- An event that cannot be delivered comes with a reason in `fault` and without its payload, so that nothing is fetched
-- or loaded that does not fit: it becomes a dead letter, and its neighbours flow. Times are bounded by what clients can
-- load. `most_bytes` then counts payloads, keys and headers, of what is returned alone: callers count it too, to know
-- whether a read was cut.
drop function outbox.read_rest(smallint[], text[], pg_snapshot, pg_snapshot, bigint, bigint, integer, bigint);
drop function outbox.read_late(
    smallint[], text[], pg_snapshot, bigint, pg_snapshot, bigint, bigint, integer, bigint
);

-- An index on both: the events of some transactions can be read in id order, a few at a time. The expression leaves it
-- as the only index that fits where that is asked for: where all events of a day are of few transactions, PostgreSQL
-- would walk through the ids instead.
drop index outbox.event_xid;
create index event_xid_id on outbox.event (xid, (id + 0));

-- Why an event of the log cannot be delivered, or null, given the largest payload that can be; null is for who does not
-- ask. One expression, which takes the place of its call when a statement is planned. The length of a payload or key is
-- known without fetching it; that of headers as text is not.
create function outbox.delivery_fault(
    payload bytea, key text, headers jsonb, deliver_at timestamptz, ceiling bigint
) returns text
language sql stable parallel safe
return case
    when ceiling is null then null
    when deliver_at < '0001-01-01 00:00:00+00' or deliver_at >= '9999-01-01 00:00:00+00' then
        'deliver_at lies outside the years 1 to 9998'
    when payload is null then 'payload is null'
    when octet_length(payload) > ceiling then
        'payload has ' || octet_length(payload)::text || ' bytes, more than the ceiling of ' || ceiling::text
    when octet_length(key) > 1024 then 'key has ' || octet_length(key)::text || ' bytes, more than the limit of 1024'
    when pg_column_size(headers) > 262144 then
        'headers have ' || pg_column_size(headers)::text || ' bytes, more than the limit of 262144'
end;

-- The window from tick A to tick B, second part, as in version 1: ids above A's sequence value in id order, visible in B
-- and not in A. Below that value it finds the latecomers, id by id: for those that lie close together.
create function outbox.read_rest(
    shards smallint[], types text[], a pg_snapshot, b pg_snapshot, after_id bigint, upto_id bigint,
    most_rows integer, most_bytes bigint, most_payload bigint default null
) returns table (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, fault text
)
language plpgsql stable rows 1000
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_sort = off
set enable_incremental_sort = off
set enable_bitmapscan = off
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    ceiling constant bigint := case when most_payload is not null then least(most_payload, outbox.payload_ceiling()) end;
begin
    return query
    select w.id, w.shard, w.uid::text, w.type,
           case when w.fault is null or octet_length(w.key) <= 1024 then w.key end,
           case when w.fault is null then w.payload end, w.content_type, w.headers,
           case when w.fault is null
                  or (w.deliver_at >= '0001-01-01 00:00:00+00' and w.deliver_at < '9999-01-01 00:00:00+00')
                then w.deliver_at end,
           case when ceiling is null
                  or (w.created_at >= '0001-01-01 00:00:00+00' and w.created_at < '9999-01-01 00:00:00+00')
                then w.created_at
                else least(greatest(w.created_at, '0001-01-01 00:00:00+00'), '9998-12-31 00:00:00+00') end,
           w.fault
      from (
        select f.*, sum(case when f.fault is null then coalesce(octet_length(f.payload), 0) else 0 end
                        + case when ceiling is null then 0
                               else case when f.fault is null or octet_length(f.key) <= 1024
                                         then coalesce(octet_length(f.key), 0) else 0 end
                                    + coalesce(octet_length(f.headers), 0) end)
                    over (order by f.id rows between unbounded preceding and 1 preceding) as before
          from (
            -- A level of its own (offset 0), so that only what is returned is looked at, and no partition's plan does it.
            select e.id, e.shard, e.uid, e.type, e.key, e.payload, e.content_type, e.deliver_at, e.created_at,
                   case when e.headers is null then null
                        when ceiling is null or pg_column_size(e.headers) <= 262144 then e.headers::text end as headers,
                   outbox.delivery_fault(e.payload, e.key, e.headers, e.deliver_at, ceiling) as fault
              from (
                select l.id, l.shard, l.uid, l.type, l.key, l.payload, l.content_type, l.headers, l.deliver_at,
                       l.created_at
                  from outbox.event l
                 where l.id > after_id and l.id <= upto_id and l.shard = any (shards)
                   and (types is null or l.type like any (types))
                   and pg_visible_in_snapshot(l.xid, b) and not pg_visible_in_snapshot(l.xid, a)
                 order by l.id
                 limit most_rows
              ) e
            order by e.id offset 0
          ) f
      ) w
     where w.before < most_bytes or w.before is null;
end
$$;

-- The window from tick A to tick B, first part: the latecomers, ids up to A's sequence value whose transactions were
-- running at A and are visible in B. Transactions that still run at B are left out before the log is looked at, however
-- many events they have by then.
--
-- Given `most_payload`, one call looks at about 5 * `most_rows` events at most, whatever the size of a transaction, and
-- at eight times as many while none is of the given types: a sink that gets nothing of a large transaction soon is behind
-- it. What it leaves is said by a last row with shard -1, whose id is the one up to which all was looked at; without it
-- all was, unless `most_rows` or `most_bytes` ended the read. Such a row is no event.
--
-- Transactions in [xmax, a_next) of A are listed when there are few; else those that have events are found one after
-- another by the index: most numbers of a long range are savepoints. Events that lie close together are read in id
-- order, others by transaction.
create function outbox.read_late(
    shards smallint[], types text[], a pg_snapshot, a_next bigint, b pg_snapshot, after_id bigint, upto_id bigint,
    most_rows integer, most_bytes bigint, most_payload bigint default null
) returns table (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, fault text
)
language plpgsql stable rows 100
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set max_parallel_workers_per_gather = 0
as $$
#variable_conflict use_column
declare
    no_limit constant bigint := 9223372036854775807;
    few constant integer := 32;
    close_together constant integer := 25;
    ceiling constant bigint := case when most_payload is not null then least(most_payload, outbox.payload_ceiling()) end;
    above constant bigint := pg_snapshot_xmax(a)::text::bigint;
    b_xmax constant bigint := pg_snapshot_xmax(b)::text::bigint;
    below constant bigint := least(a_next, b_xmax);
    most_looks constant bigint := 5 * most_rows::bigint;
    late xid8[] := array(select x from pg_snapshot_xip(a) x where pg_visible_in_snapshot(x, b));
    still bigint[];
    each bigint;
    looks bigint;
    last_id bigint := upto_id;
    from_id bigint := after_id;
    steps constant integer := 8;
    wanted boolean := true;
begin
    if below - above between 1 and few then
        late := late || array(
            select x::text::xid8 from generate_series(above, below - 1) x where pg_visible_in_snapshot(x::text::xid8, b)
        );
    elsif below > above then
        still := array(
            select x::text::bigint from pg_snapshot_xip(b) x where x::text::bigint between above and below - 1 order by 1
        );
        late := late || array(
            select f.xid from unnest(above - 1 || still, still || below) g (low, high)
             cross join lateral (
                with recursive found (xid) as (
                    select (select l.xid from outbox.event l
                             where l.xid > g.low::text::xid8 and l.xid < g.high::text::xid8 order by l.xid limit 1)
                    union all
                    select (select l.xid from outbox.event l
                             where l.xid > f.xid and l.xid < g.high::text::xid8 order by l.xid limit 1)
                      from found f where f.xid is not null
                )
                select f.xid from found f where f.xid is not null
             ) f
        );
    end if;
    if cardinality(late) = 0 then
        return;
    end if;
    if ceiling is not null then
        select count(*), min(r.id) - 1, max(r.id) into looks, after_id, last_id
          from (
            select l.id from outbox.event l
             where l.xid = any (late) and l.id + 0 > after_id and l.id + 0 <= upto_id
             limit most_looks + 1
          ) r;
        if looks = 0 then
            return;
        end if;
        if looks > most_looks then
            -- The next ids of each transaction, up to where those of one end first: there are no others before.
            each := greatest(most_looks / cardinality(late), 1);
            for step in 1..steps loop
                select min(f.first_id) - 1, coalesce(min(f.last_id), upto_id), coalesce(bool_or(f.wanted), false)
                  into after_id, last_id, wanted
                  from unnest(late) x (xid)
                 cross join lateral (
                    select min(i.id) as first_id, case when count(*) = each then max(i.id) end as last_id,
                           bool_or(types is null or i.type like any (types)) as wanted
                      from (
                        select l.id, l.type from outbox.event l
                         where l.xid = x.xid and l.id + 0 > from_id and l.id + 0 <= upto_id
                         order by l.id + 0
                         limit each
                      ) i
                 ) f;
                exit when wanted or last_id >= upto_id;
                from_id := last_id;
            end loop;
        end if;
    end if;
    if not wanted then
        null;  -- only how far it got
    elsif looks is not null and b_xmax < no_limit and last_id - after_id <= close_together * least(looks, most_looks) then
        return query
        select * from outbox.read_rest(shards, types, a, b, after_id, last_id, most_rows, most_bytes, most_payload);
    else
    return query
    select w.id, w.shard, w.uid::text, w.type,
           case when w.fault is null or octet_length(w.key) <= 1024 then w.key end,
           case when w.fault is null then w.payload end, w.content_type, w.headers,
           case when w.fault is null
                  or (w.deliver_at >= '0001-01-01 00:00:00+00' and w.deliver_at < '9999-01-01 00:00:00+00')
                then w.deliver_at end,
           case when ceiling is null
                  or (w.created_at >= '0001-01-01 00:00:00+00' and w.created_at < '9999-01-01 00:00:00+00')
                then w.created_at
                else least(greatest(w.created_at, '0001-01-01 00:00:00+00'), '9998-12-31 00:00:00+00') end,
           w.fault
      from (
        select f.*, sum(case when f.fault is null then coalesce(octet_length(f.payload), 0) else 0 end
                        + case when ceiling is null then 0
                               else case when f.fault is null or octet_length(f.key) <= 1024
                                         then coalesce(octet_length(f.key), 0) else 0 end
                                    + coalesce(octet_length(f.headers), 0) end)
                    over (order by f.id rows between unbounded preceding and 1 preceding) as before
          from (
            -- A level of its own (offset 0), so that only what is returned is looked at, and no partition's plan does it.
            select e.id, e.shard, e.uid, e.type, e.key, e.payload, e.content_type, e.deliver_at, e.created_at,
                   case when e.headers is null then null
                        when ceiling is null or pg_column_size(e.headers) <= 262144 then e.headers::text end as headers,
                   outbox.delivery_fault(e.payload, e.key, e.headers, e.deliver_at, ceiling) as fault
              from (
                select l.id, l.shard, l.uid, l.type, l.key, l.payload, l.content_type, l.headers, l.deliver_at,
                       l.created_at
                  from outbox.event l
                 where l.xid = any (late) and l.id + 0 > after_id and l.id + 0 <= last_id
                   and (l.shard + 0) = any (shards) and (types is null or l.type like any (types))
                 order by l.id + 0
                 limit most_rows
              ) e
            order by e.id offset 0
          ) f
      ) w
     where w.before < most_bytes or w.before is null
     order by w.id;
    end if;
    if looks > most_looks and last_id < upto_id then
        return query
        select last_id, -1::smallint, ''::text, ''::text, null::text, null::bytea, ''::text, null::text,
               null::timestamptz, '2000-01-01 00:00:00+00'::timestamptz, null::text;
    end if;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Settling and claims of rows
-- ---------------------------------------------------------------------------------------------------------

-- Rows that are dead may be as many as there are: only people look at them. So no index that a relay goes through has
-- them, but the one that sinks with when_dead = "hold" ask.
drop index outbox.delivery_key;
create index delivery_key on outbox.delivery (sink, key, id) where ordered and state <> 'dead';
create index delivery_dead_key on outbox.delivery (sink, key, id) where ordered and state = 'dead';
-- A sweep looks at the keys with held rows alone.
create index delivery_held on outbox.delivery (sink, key) where state = 'held';
-- Rows that count for `parked_max` and have no place in the order of a key: all but events that were scheduled.
create index delivery_unordered on outbox.delivery (sink, id)
 where not ordered and state <> 'dead' and (deliver_at is null or deliver_at <= since);

-- Up to `most` keys (null: all) behind `after_key` (null: from the first one on) that have held rows, in their order.
-- It steps from key to key, so the rows of one key cost no more than one row.
create function outbox.held_keys(sink_name text, after_key text, most integer) returns table (key text)
language plpgsql stable rows 1000
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
as $$
#variable_conflict use_column
declare
    first_key text := case
        when after_key is null
        then (select d.key from outbox.delivery d where d.sink = sink_name and d.state = 'held' order by d.key limit 1)
        else (select d.key from outbox.delivery d
               where d.sink = sink_name and d.state = 'held' and d.key > after_key order by d.key limit 1) end;
begin
    return query
    with recursive held (key) as (
        select first_key collate "C"
        union all
        select (select d.key from outbox.delivery d
                 where d.sink = sink_name and d.state = 'held' and d.key > h.key order by d.key limit 1)
          from held h where h.key is not null
    )
    select h.key from held h where h.key is not null limit most;
end
$$;

-- Number of events of a sink that are rows to be delivered, counted up to `most` of those with a place in the
-- order of a key and of those without. Events that were scheduled are left out: they would be rows anyway. And, if
-- asked for `trouble`, whether one came back without an attempt being counted, as those do that wait for a part of the
-- destination; no more than `most` of those that are about to be due are looked at.
create function outbox.rows_standing(
    sink_name text, most integer, trouble boolean, out standing bigint, out waiting boolean
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    select (select count(*)
              from (select from outbox.delivery d
                     where d.sink = sink_name and d.ordered and d.state <> 'dead' limit most) r)
         + (select count(*)
              from (select from outbox.delivery d
                     where d.sink = sink_name and not d.ordered and d.state <> 'dead'
                       and (d.deliver_at is null or d.deliver_at <= d.since) limit most) r)
      into standing;
    waiting := trouble and exists (
        select from (
            select d.attempts, d.last_error from outbox.delivery d
             where d.sink = sink_name and d.state = 'waiting' and d.due_at < now() + interval '5 minutes'
             order by d.due_at, d.id limit most
        ) r
         where r.attempts = 0 and r.last_error is not null
    );
end
$$;

-- Ends the leases of rows whose delivery ended without an outcome, by a relay that continues: no claim is counted
-- against them. Rows under a lease are due, and none is dead.
create function outbox.give_rows_back(sink_name text, owner_id uuid) returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
declare
    waiting integer;
    held integer;
begin
    update outbox.delivery d
       set lease = null, lease_until = null, owner = null, claims = greatest(d.claims - 1, 0)
     where d.sink = sink_name and d.state = 'waiting' and d.due_at <= clock_timestamp() and d.owner = owner_id;
    get diagnostics waiting = row_count;
    update outbox.delivery d
       set lease = null, lease_until = null, owner = null, claims = greatest(d.claims - 1, 0)
     where d.sink = sink_name and d.state = 'held' and d.owner = owner_id;
    get diagnostics held = row_count;
    return waiting + held;
end
$$;

-- Claims rows of `delivery` that are due: sets owner, lease and `claims`, and returns their events.
--
-- A row of a key may be claimed when no earlier row of its sink and key takes part in the order: a condition
-- of the claim, not a state that somebody must change, so nothing can be left behind. With `hold`, dead rows
-- take part too: they are asked for by themselves, so that without it none is looked at. Waiting rows are found by the
-- time they are due, held rows at the head of the given `keys`, or of every key with held rows if `sweep`; they are due
-- at once unless they were given back with a delay.
-- `with_followers` is for relays that deliver the rows of a key in order: they come with the first one, as many as there
-- is room for beside the first ones of other keys, up to a row that may not be claimed. What came back before, with an
-- attempt counted or without, comes alone: else the rows behind it are delivered, or written, each time that it comes
-- back.
-- `suspects` asks for a row that was claimed three times and never settled, which may have killed its process: such a
-- row comes alone, and never to a call that asks for others.
-- Waiting rows are locked as they are looked for, so that relays that come at the same time to rows that are due at the
-- same time find other ones each, and none finds only what another one takes.
-- The rows hold about `most_bytes` of payload, key and headers beyond the first one. With `most_payload`, an event that
-- no relay can deliver has a `fault` that says why, and no payload: its payload is larger than that or than
-- outbox.payload_ceiling(), or its deliver_at is a time that not every client can load.
drop function outbox.claim_rows(
    text, uuid, uuid, double precision, integer, bigint, boolean, text[], boolean, boolean, boolean
);
create function outbox.claim_rows(
    sink_name text, owner_id uuid, lease_id uuid, lease_for double precision, most_rows integer, most_bytes bigint,
    hold boolean, keys text[], sweep boolean, suspects boolean, with_followers boolean, most_payload bigint default null
) returns table (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, ordered boolean, attempts integer, claims integer, fault text
)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    first_time constant timestamptz := '0001-01-01 00:00:00+00';
    last_time constant timestamptz := '9999-01-01 00:00:00+00';
    ceiling constant bigint := case when most_payload is not null then least(most_payload, outbox.payload_ceiling()) end;
    waiting bigint[];
    held bigint[];
    behind bigint[] := '{}';
    chosen bigint[];
    counted integer := case when outbox.known_down(sink_name) then 0 else 1 end;
begin
    if suspects then
        chosen := array(
            select d.id from outbox.delivery d
             where d.sink = sink_name and d.suspect and d.state <> 'dead' and d.due_at <= now()
               and (d.lease_until is null or d.lease_until <= now())
               and (not d.ordered or (
                    not exists (
                        select from outbox.delivery f
                         where f.sink = sink_name and f.key = d.key and f.id < d.id and f.ordered and f.state <> 'dead')
                    and not (hold and exists (
                        select from outbox.delivery f
                         where f.sink = sink_name and f.key = d.key and f.id < d.id and f.ordered and f.state = 'dead'))))
             order by d.due_at, d.id
             limit 1
               for update skip locked
        );
    else
        waiting := array(
            select d.id from outbox.delivery d
             where d.sink = sink_name and d.state = 'waiting' and d.due_at <= now()
               and (d.lease_until is null or d.lease_until <= now()) and not d.suspect
               and (not d.ordered or (
                    not exists (
                        select from outbox.delivery f
                         where f.sink = sink_name and f.key = d.key and f.id < d.id and f.ordered and f.state <> 'dead')
                    and not (hold and exists (
                        select from outbox.delivery f
                         where f.sink = sink_name and f.key = d.key and f.id < d.id and f.ordered and f.state = 'dead'))))
             order by d.due_at, d.id
             limit most_rows
               for update skip locked
        );
        if sweep then
            keys := array(select k.key from outbox.held_keys(sink_name, null, null) k);
        end if;
        held := array(
            select h.id from unnest(keys) k (key)
             cross join lateral (
                select d.id, d.state, d.due_at, d.lease_until, d.suspect from outbox.delivery d
                 where d.sink = sink_name and d.key = k.key and d.ordered and d.state <> 'dead'
                 order by d.id limit 1
             ) h
             where h.state = 'held' and h.due_at <= now()
               and (h.lease_until is null or h.lease_until <= now()) and not h.suspect
               and not (hold and exists (
                    select from outbox.delivery f
                     where f.sink = sink_name and f.key = k.key and f.id < h.id and f.ordered and f.state = 'dead'))
             limit most_rows
        );
        if with_followers and cardinality(waiting || held) between 1 and most_rows - 1 then
            behind := array(
                select r.id from outbox.delivery h
                 cross join lateral (
                    select d.id, d.due_at, d.lease_until, d.last_error, d.suspect from outbox.delivery d
                     where d.sink = sink_name and d.key = h.key and d.ordered and d.id > h.id and d.state <> 'dead'
                     order by d.id limit most_rows / cardinality(waiting || held)
                 ) r
                 where h.sink = sink_name and h.id = any (waiting || held) and h.ordered and h.last_error is null
                   and r.last_error is null and not r.suspect and r.due_at <= now()
                   and (r.lease_until is null or r.lease_until <= now())
            );
        end if;
        chosen := array(
            select c.id from (
                select b.id, b.follows, sum(b.bytes) over (order by b.follows, b.id) - b.bytes as before
                  from (
                    select d.id, d.id = any (behind) as follows,
                           case when octet_length(d.payload) > ceiling then 0
                                else coalesce(octet_length(d.payload), 0) end
                           + coalesce(octet_length(d.key), 0)
                           + case when d.headers is null then 0 else octet_length(d.headers::text) end as bytes
                      from outbox.delivery d
                     where d.sink = sink_name and d.id = any (waiting || held || behind)
                  ) b
            ) c
            where c.before < most_bytes or c.before <= 0
            order by c.follows, c.id
            limit most_rows
        );
        -- A statement of its own: joined to the change, a plan made while there was no row goes through all rows of the
        -- sink for each row that is claimed.
        if held <> '{}' or behind <> '{}' then
            chosen := array(
                select l.id from outbox.delivery l
                 where l.sink = sink_name and l.id = any (chosen) and l.state <> 'dead' and l.due_at <= now()
                   and (l.lease_until is null or l.lease_until <= now())
                   for update skip locked
            );
        end if;
        -- A row that must wait, or was claimed by another relay since it was looked for, may come before what is locked
        -- here.
        if behind <> '{}' then
            chosen := array(
                select i.id from (
                    select l.key, l.ordered, array_agg(l.id) as ids from outbox.delivery l
                     where l.sink = sink_name and l.id = any (chosen) group by l.key, l.ordered
                ) c
                 left join lateral (
                    select f.id from outbox.delivery f
                     where f.sink = sink_name and f.key = c.key and f.ordered and f.state <> 'dead'
                       and f.id <> all (c.ids)
                     order by f.id limit 1
                ) other on c.ordered
                 left join lateral (
                    select f.id from outbox.delivery f
                     where hold and f.sink = sink_name and f.key = c.key and f.ordered and f.state = 'dead'
                     order by f.id limit 1
                ) dead on c.ordered
                 cross join lateral unnest(c.ids) i (id)
                 where (other.id is null or i.id < other.id) and (dead.id is null or i.id < dead.id)
            );
        end if;
    end if;
    return query
    update outbox.delivery d
       set owner = owner_id, lease = lease_id, lease_until = clock_timestamp() + lease_for * interval '1 second',
           claims = d.claims + counted
     where d.sink = sink_name and d.id = any (chosen)
    returning d.id, d.shard, d.uid::text, d.type, d.key,
              case when ceiling is null
                     or octet_length(d.payload) <= ceiling
                        and (d.deliver_at is null or d.deliver_at >= first_time and d.deliver_at < last_time)
                   then d.payload end,
              d.content_type, d.headers::text,
              case when ceiling is null or d.deliver_at >= first_time and d.deliver_at < last_time then d.deliver_at end,
              case when ceiling is null then d.created_at
                   else greatest(first_time, least(d.created_at, last_time - interval '1 second')) end,
              d.ordered, d.attempts, d.claims,
              case when ceiling is not null and (d.deliver_at < first_time or d.deliver_at >= last_time)
                   then 'deliver_at lies outside the years 1 to 9998'
                   when ceiling is not null and d.payload is null then 'payload is null'
                   when octet_length(d.payload) > ceiling
                   then format('payload has %s bytes, more than the ceiling of %s', octet_length(d.payload), ceiling)
              end;
end
$$;

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
-- the schema's owner may lock, so that no other role can keep a relay waiting here.
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

-- Raises the counter of the configuration and returns it. It is above every generation, also above one that was written
-- by hand. A change holds its row until the end of the transaction, so two changes never see the same value.
create function outbox.raise_config() returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    raised bigint;
begin
    update outbox.meta m
       set config = greatest(m.config, (select max(s.generation) from outbox.sink s)) + 1
    returning m.config into raised;
    return raised;
end
$$;

-- Statements that change sinks by hand raise the counter, too. SECURITY DEFINER: a role that may write sinks need not be
-- able to write the counter.
create function outbox.sink_changed() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform outbox.raise_config();
    return null;
end
$$;

create trigger sink_changed after insert or truncate or update of patterns, generation on outbox.sink
for each statement execute function outbox.sink_changed();

-- A sink that is deleted takes its rows and positions with it: of a later sink of that name they would be taken for its
-- own. Runs after the foreign key has deleted the shards, which waits for settlements that have passed their fence; none
-- passes it afterwards.
create function outbox.sink_deleted() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform outbox.raise_config();
    delete from outbox.delivery d where d.sink = any (array(select r.name from removed r));
    delete from outbox.progress p where p.sink = any (array(select r.name from removed r));
    return null;
end
$$;

create trigger sink_deleted after delete on outbox.sink
referencing old table as removed
for each statement execute function outbox.sink_deleted();

-- A tick. As in version 1, except that `generations` is the counter of the configuration, and that it is refused (OR002)
-- where the transaction numbers of the log are not the server's: no relay of any version reads there before a rebase.
create or replace function outbox.tick(
    out seq bigint, out snapshot pg_snapshot, out next_xid bigint, out incarnation text, out wal bigint,
    out now timestamptz, out generations bigint
)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    xmax bigint;
    home bigint;
begin
    if pg_current_xact_id_if_assigned() is not null then
        raise exception 'outbox.tick must be a transaction of its own';
    end if;
    -- Not `last_value` of the relation: nextval() stores a value 32 ahead there while it writes its WAL record, and a
    -- query can see it. Ids up to a tick's sequence value that are given out after the tick would never be read.
    seq := pg_sequence_last_value('outbox.event_id_seq');
    if seq is null then
        -- The function also returns null without the privilege (PostgreSQL 18), which this statement refuses.
        perform from outbox.event_id_seq;
        seq := 0;
    end if;
    snapshot := pg_current_snapshot();
    xmax := pg_snapshot_xmax(snapshot)::text::bigint;
    next_xid := xmax + (((3 + age('3'::xid)::bigint) - xmax) & 4294967295);
    -- After the snapshot: who sees the old value has a tick from before the change, so no window of an older
    -- configuration ends behind it and passes by events that only the newer one routes.
    select m.config, m.system_identifier into generations, home from outbox.meta m;
    if home is distinct from (select c.system_identifier from pg_control_system() c) then
        raise exception 'the log comes from another cluster, as after a restore, a move or pg_upgrade: '
            'stop every relay, then run outbox-relay rebase' using errcode = 'OR002';
    end if;
    wal := pg_current_wal_lsn() - '0/0'::pg_lsn;
    now := clock_timestamp();
    incarnation := outbox.incarnation();
end
$$;

-- Makes the sinks of a configuration known, or gives them other patterns under a new generation, all in one
-- transaction. `wanted` is a JSON array of {"name", "patterns": [...], "start": "beginning" | "now" | null}.
-- The shards of a new sink and their first position, one tick for all, are written with it. Without `start`,
-- the sinks of the first configuration of a database begin at the beginning of the log, later ones at the tick.
-- After a rebase the beginning lies in the old numbering: its rows are read by a window of their own.
--
-- New generations are values of the counter, and the epochs of a new sink begin above 2^32 times the counter: neither is
-- ever given out again, so nothing that a relay still holds or writes of a removed sink of the same name counts.
--
-- With `only_from` no sink is made, and patterns are changed only where the generation is still this one.
drop function outbox.register_sinks(jsonb, bigint, pg_snapshot, bigint);
create function outbox.register_sinks(
    wanted jsonb, tick_seq bigint, tick_snapshot pg_snapshot, tick_next bigint, only_from bigint default null
) returns table (name text, generation bigint, patterns text[])
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    first boolean;
    sink record;
    beginning boolean;
    rebased outbox.meta;
    counter bigint;
begin
    lock table outbox.sink in share row exclusive mode;
    first := not exists (select from outbox.sink);
    for sink in
        select w.name, array(select jsonb_array_elements_text(w.patterns)) as patterns, w.start
          from jsonb_to_recordset(wanted) w (name text, patterns jsonb, start text)
    loop
        if exists (select from outbox.sink s
                    where s.name = sink.name and s.patterns <> sink.patterns
                      and s.generation = coalesce(only_from, s.generation)) then
            counter := outbox.raise_config();
            update outbox.sink s set patterns = sink.patterns, generation = counter where s.name = sink.name;
        elsif only_from is null and not exists (select from outbox.sink s where s.name = sink.name) then
            beginning := coalesce(sink.start = 'beginning', first);
            -- Rows that were written for a removed sink of this name after its removal.
            delete from outbox.delivery d where d.sink = sink.name;
            delete from outbox.progress p where p.sink = sink.name;
            counter := outbox.raise_config();
            select * into rebased from outbox.meta m;
            insert into outbox.sink (name, patterns, generation, start)
            values (sink.name, sink.patterns, counter, case when beginning then 'beginning' else 'now' end);
            insert into outbox.shard (sink, shard, epoch)
            select sink.name, n, counter << 32 from generate_series(0, 63) n;
            insert into outbox.progress (
                sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id
            )
            select sink.name, array(select generate_series(0, 63)), array_fill(counter << 32, array[64]),
                   case when beginning then 0 else tick_seq end,
                   case when beginning then '3:3:'::pg_snapshot else tick_snapshot end,
                   case when beginning then 3 else tick_next end,
                   case when beginning and rebased.floor > 0 then rebased.floor end,
                   case when beginning and rebased.floor > 0
                        then '9223372036854775807:9223372036854775807:'::pg_snapshot end,
                   case when beginning and rebased.floor > 0 then rebased.floor_xid end,
                   0;
        end if;
    end loop;
    return query
        select s.name, s.generation, s.patterns from outbox.sink s
         where s.name in (select w.name from jsonb_to_recordset(wanted) w (name text));
end
$$;

-- Removes a sink with its rows, positions and shards, and returns how many rows of `delivery` it had. Relays that serve it
-- lose its shards, and what they still write of it counts for nothing, also when a sink of this name is made again.
-- Deleting the shards comes first: it waits for settlements that have passed their fence, and no other passes it then.
-- They are locked in the order in which relays lock them. Rows are locked in no order, so that is tried again.
create function outbox.remove_sink(sink_name text) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    tries constant integer := 5;
    removed_rows bigint;
begin
    lock table outbox.sink in share row exclusive mode;
    if not exists (select from outbox.sink s where s.name = sink_name) then
        raise exception using errcode = 'no_data_found',
            message = format('there is no sink %s', coalesce(quote_literal(sink_name), 'without a name')),
            hint = (select coalesce('There are: ' || string_agg(s.name, ', ' order by s.name), 'There is none.')
                      from outbox.sink s);
    end if;
    perform from outbox.shard s where s.sink = sink_name order by s.shard for update;
    delete from outbox.shard s where s.sink = sink_name;
    for attempt in 1..tries loop
        begin
            delete from outbox.delivery d where d.sink = sink_name;
            get diagnostics removed_rows = row_count;
            exit;
        exception when deadlock_detected then
            if attempt = tries then
                raise;
            end if;
        end;
    end loop;
    delete from outbox.sink s where s.name = sink_name;
    return removed_rows;
end
$$;

-- The unsettled part of the log of a sink, as pieces for the two reading functions: ids in (after_id, upto_id], read
-- from tick A to the snapshot in which everything is visible, since a query sees only what is committed anyway.
-- Shards that stand at the same newest position share their pieces. Of a position (A, B, last) these are left:
-- the latecomers of A and the rest, both behind `last`; and up to `last` what is visible now and not in B, which
-- is the latecomers of B and, above B's sequence value, what was committed since.
-- The last window of an old numbering (see outbox.rebase) is left as it is read; above its end nothing is done.
-- Of a shard without a position the whole log is left.
create or replace function outbox.unsettled(sink_name text) returns table (
    late boolean, shards smallint[], a pg_snapshot, a_next bigint, after_id bigint, upto_id bigint
)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    with position as (
        select array_agg(p.shard order by p.shard) as shards,
               p.a_seq, p.a_snapshot::text::pg_snapshot as a, p.a_next,
               p.b_seq, p.b_snapshot::text::pg_snapshot as b, p.b_next, p.last_id,
               coalesce(p.b_snapshot::text = '9223372036854775807:9223372036854775807:', false) as old,
               (select m.floor from outbox.meta m) as floor
          from outbox.standing p
         where p.sink = sink_name
         group by p.a_seq, p.a_snapshot::text, p.a_next, p.b_seq, p.b_snapshot::text, p.b_next, p.last_id
    ),
    missing as (
        select array_agg(n.shard::smallint order by n.shard) as shards
          from outbox.sink k
         cross join generate_series(0, 63) n (shard)
         where k.name = sink_name and n.shard <> all (array(select unnest(p.shards) from position p))
    )
    select k.late, p.shards, k.a, k.a_next, k.after_id, k.upto_id
      from position p
     cross join lateral (values
        (true, p.a, p.a_next, greatest(p.last_id, case when p.old then 0 else p.floor end), p.a_seq),
        (false, p.a, null, greatest(p.last_id, p.a_seq), case when p.old then p.b_seq else 9223372036854775807 end),
        (true, p.b, p.b_next, p.floor, case when not p.old then least(p.last_id, p.b_seq) end),
        (false, p.b, null, p.b_seq, case when not p.old then p.last_id end),
        (false, case when p.old then (p.b_next || ':' || p.b_next || ':')::pg_snapshot end, null, p.b_seq,
         case when p.old then 9223372036854775807 end)
     ) k (late, a, a_next, after_id, upto_id)
     where k.after_id < k.upto_id
    union all
    select false, m.shards, '3:3:'::pg_snapshot, null, 0, 9223372036854775807
      from missing m
     where m.shards is not null
$$;

-- Gives new ids, above `highest`, to events that took theirs from a sequence that was behind the log, and returns how many
-- there were. Ids up to `highest` may be those of other events, and below the positions of sinks they would be passed by.
--
-- An event that this cluster's transactions wrote has as `xmin` the transaction of `xid` or a savepoint of it; one that was
-- copied here has that of the copy. So those that are meant begin at their `xid`, modulo 2^32. Others that look the same
-- come twice, which is allowed.
create function outbox.renumber(upto_id bigint, highest bigint) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    renumbered bigint;
begin
    update outbox.event e
       set id = highest + n.place
      from (
        select l.tableoid as part, l.ctid as row_id, row_number() over (order by l.id, l.created_at) as place
          from outbox.event l
         where l.id <= upto_id
           and ((l.xmin::text::bigint - (l.xid::text::bigint & 4294967295)) & 4294967295) < 2147483648
      ) n
     where e.tableoid = n.part and e.ctid = n.row_id;
    get diagnostics renumbered = row_count;
    return renumbered;
end
$$;

-- Up to where each shard of a sink has settled the log without a gap: what is not done of it has higher ids. Shards
-- without a position have settled nothing.
create function outbox.settled_upto(sink_name text) returns table (shards smallint[], upto_id bigint)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select u.shards, min(case when u.late then l.first_id - 1 else u.after_id end)
      from outbox.unsettled(sink_name) u
      left join lateral (
        select min(e.id) as first_id
          from outbox.event e
         where u.late and e.id > u.after_id and e.id <= u.upto_id and e.shard = any (u.shards)
           and (e.xid = any (array(select pg_snapshot_xip(u.a)))
                or (e.xid >= pg_snapshot_xmax(u.a) and e.xid < u.a_next::text::xid8))
      ) l on true
     group by u.shards
$$;

-- After a restore, or a move to another cluster, the transaction numbers that are stored mean nothing to the
-- server, and ids may be given out twice. This makes them harmless; run it while no relay runs. Returns the floor:
-- the largest id or sequence value that is known; the sequence continues above it.
--
-- Every shard gets a last window of the old numbering: from the lowest id that it has not settled, with a tick A in which
-- nothing is visible, to a tick in which everything is visible. So what was emitted between the restore and now is read,
-- whatever its transaction number means in the old numbering, and so is what an earlier window of this kind has left.
-- `b_next` is the oldest transaction that runs now: behind that window the shard is at a tick of the floor
-- and of the snapshot that ends there, with none pending, because no emitter runs beside this lock.
--
-- Shards without a position get one, at the beginning: nothing is known of what they have settled.
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
    update outbox.meta set floor = new_floor, floor_xid = oldest, system_identifier = here;
    return new_floor;
end
$$;

-- A log that was restored into this cluster before it was migrated, as far as that shows: to be rebased first.
update outbox.meta m
   set system_identifier = 0
 where exists (
    select from (select e.xid from outbox.event e where e.id > m.floor order by e.id desc limit 1000) n
     where n.xid >= pg_snapshot_xmax(pg_current_snapshot())
 );

-- ---------------------------------------------------------------------------------------------------------
-- Partitions
-- ---------------------------------------------------------------------------------------------------------

-- Kinds of grantees; `read`, `operate` and `payloads` are for those who look and act.
alter table outbox.grantee drop constraint grantee_kind_check;
alter table outbox.grantee add constraint grantee_kind_check
    check (kind in ('emit', 'relay', 'read', 'operate', 'payloads'));

-- The lock of work that one session does at a time. An advisory lock could be taken by every role of the database.
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
-- functions among it, is not looked at: a rebase writes new positions.
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
    -- The rows that are left are looked at first: after a trim it is a row or two for each shard, while thousands may
    -- be gone.
    select count(*) as shards, min(m.sink) as sink into lost
      from (
        select k.name as sink, n.shard::smallint as shard
          from outbox.sink k cross join generate_series(0, 63) n (shard)
         where k.name in (select g.sink from gone g)
        except
        select p.sink, u.shard from outbox.progress p cross join lateral unnest(p.shards) u (shard)
      ) m
     where exists (select from gone g where g.sink = m.sink and m.shard = any (g.shards));
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
