-- The largest payload in bytes that an event may have. Only the owner of the schema moves it: migrate --max-payload-bytes.
create or replace function outbox_internal.payload_ceiling() returns integer
language sql stable parallel safe
set search_path = pg_catalog, pg_temp
return (select m.max_payload_bytes from outbox.meta m);

-- A UUIDv7 (RFC 9562, 5.7): milliseconds since 1970 in the first 48 bits, random bits after them. PostgreSQL has its
-- own from 18 on, which costs a third of this one.
create or replace function outbox_internal.uuid7() returns uuid
language sql volatile parallel safe
return encode(
    set_bit(
        set_bit(
            overlay(
                uuid_send(gen_random_uuid())
                placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3)
                from 1 for 6
            ),
            52, 1
        ),
        53, 1
    ),
    'hex'
)::uuid;
do $$
begin
    if current_setting('server_version_num')::integer >= 180000 then
        execute 'create or replace function outbox_internal.uuid7() returns uuid language sql volatile parallel safe return uuidv7()';
    end if;
end
$$;

-- A uid for the event with this id. It is of version 7 (RFC 9562): the time, random bits, and the id as its last 12 hexadecimal
-- digits, so that the event is found without an index on uids.
create or replace function outbox_internal.uid_of(id bigint) returns uuid
language sql volatile parallel safe
return (left(outbox_internal.uuid7()::text, 24) || lpad(to_hex(id), 12, '0'))::uuid;

-- The id in a uid. Only the log says whether it is that of the event: see outbox_internal.event_id.
create or replace function outbox_internal.id_in(uid uuid) returns bigint
language sql immutable parallel safe
return ('x' || right(uid::text, 12))::bit(48)::bigint;

-- The shard of an event: a hash of its key, or of its uid if it has none. Events keep the shard that they were emitted
-- with. Who inserts events otherwise than by emit, such as a loader, calls it too. One expression, which takes the place of
-- its call when a statement is planned.
create or replace function outbox_internal.shard_of(key text, uid uuid) returns smallint
language sql immutable parallel safe
return (hashtextextended(coalesce(key collate "C", uid::text collate "C"), 0) & 63)::smallint;

-- The role that emits: the session's, or the one that it took with SET ROLE, which needs a membership. A function of the
-- application that is SECURITY DEFINER changes neither.
create or replace function outbox_internal.emitter() returns text
language sql stable
return coalesce(nullif(current_setting('role'), 'none'), session_user::text);

-- The same role by its number, which it keeps when it is renamed; null if it was renamed after SET ROLE.
create or replace function outbox_internal.emitter_oid() returns oid
language sql stable
return to_regrole(quote_ident(outbox_internal.emitter()))::oid;

-- True if a uid, key or event belongs to another role than the one that emits, by the name and number that it was recorded with.
-- A role that was renamed is still the one that has them. Only an old name that no role has now is doubted: elsewhere, as after a
-- restore, the number may be that of another role.
create or replace function outbox_internal.is_others(owner text, owner_oid oid) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select coalesce(owner <> outbox_internal.emitter()
                    and (owner_oid <> outbox_internal.emitter_oid() or exists (select from pg_roles r where r.rolname = owner)),
                    false)
$$;

-- Describe a text by its first wrong character: "a b" has " " at character 2. `wrong` is a regular expression that one
-- wrong character matches. Characters that cannot be shown are written as code points.
create or replace function outbox_internal.shown(value text, wrong text) returns text
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

-- The details of an attempt, without the destination's answer for roles that may not see payloads: an answer may repeat
-- what was sent.
create or replace function outbox_internal.shown_detail(detail jsonb) returns jsonb
language sql stable
return case when detail ? 'answer' and not has_column_privilege(outbox_internal.emitter(), 'outbox.delivery', 'payload', 'SELECT') then detail - 'answer' else detail end;

-- The fault of a header mapping, or null. Names are HTTP tokens (RFC 9110, 5.6.2).
create or replace function outbox_internal.header_fault(headers jsonb) returns text
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
                          outbox_internal.shown(name, '[^A-Za-z0-9!#$%&''*+.^_`|~-]'));
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

-- The number of a replay by its internal name; null for the name of a sink.
create or replace function outbox_internal.replay_of(name text) returns bigint
language sql immutable
return case when name collate "C" ~ '^~[0-9]{1,18}$' then substr(name, 2)::bigint end;

-- The sink to which events of a sink or a replay go.
create or replace function outbox_internal.sink_of(name text) returns text
language sql stable
return coalesce((select r.target from outbox.replay r where r.id = outbox_internal.replay_of(name)), name);

-- True if the position of a shard has passed an event of the log (see outbox_relay/domain/window.py): the event is
-- visible in A, or it is visible in B and not after the last id done. Ids up to the floor belong to an older numbering,
-- whose last window ends at B: of its ids up to A's sequence value only those that were running at A are left. The same
-- holds of a position that a seek to a time has set: its A has a sequence value, and no transaction was running.
create or replace function outbox_internal.position_passed(
    event_id bigint, event_xid xid8, a_seq bigint, a_snapshot pg_snapshot, a_next bigint, b_snapshot pg_snapshot,
    last_id bigint, floor bigint
) returns boolean
language sql stable
return case
    when b_snapshot::text = '9223372036854775807:9223372036854775807:' then
        event_id <= last_id
        or (event_id <= a_seq and (pg_visible_in_snapshot(event_xid, a_snapshot) or event_xid >= a_next::text::xid8))
    else
        pg_visible_in_snapshot(event_xid, a_snapshot)
        or event_id <= least(floor, a_seq)
        or coalesce(pg_visible_in_snapshot(event_xid, b_snapshot)
                    and (event_id <= last_id or event_id <= a_seq and event_xid >= a_next::text::xid8), false)
end;

-- The kind of an error without a status, as outbox.delivery_summary groups them: its first 200 characters without what
-- differs from event to event, which are uuids and numbers. Empty: there is no error.
create or replace function outbox_internal.error_kind(error text) returns text
language sql immutable
return coalesce(
    regexp_replace(
        regexp_replace(left(error, 200) collate "C", '[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}', '…', 'gi'),
        '[0-9]+', 'N', 'g'),
    '');

-- True if an event was erased. One expression, which takes the place of its call when a statement is planned.
create or replace function outbox_internal.is_erased(content_type text, payload bytea) returns boolean
language sql immutable parallel safe
return content_type is not distinct from 'application/x-erased' and coalesce(octet_length(payload), 0) = 0;

-- True if a sink with these types, SQL LIKE patterns or null for every type, gets an event: erased ones are left out, and so are
-- the reserved types of notices unless it asks for them. One expression, which takes the place of its call when a statement is
-- planned.
create or replace function outbox_internal.is_routed(
    type text, content_type text, payload bytea, types text[], notices boolean
) returns boolean
language sql immutable parallel safe
return (types is null or type like any (types)) and (notices or type not like 'outbox.%')
       and not outbox_internal.is_erased(content_type, payload);

-- Why an event of the log cannot be delivered, or null, given the largest payload that can be; null is for who does not
-- ask. One expression, which takes the place of its call when a statement is planned. The length of a payload or key is
-- known without fetching it; that of headers as text is not.
create or replace function outbox_internal.delivery_fault(
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

-- The fault of an event, as a message, or null. `most` is the setting `outbox.max_payload_bytes` or null, which
-- only lowers the ceiling; `outbox.event_index` is set by statements that emit many events, and says which was refused.
--
-- A regular expression with a bound such as {1,255} costs as much as the rest: lengths are compared. The caller's
-- collation may be one that regular expressions refuse: they get their own.
-- The content type of erased events is refused: no function would read such an event.
create or replace function outbox_internal.event_fault(
    type text, payload bytea, key text, headers jsonb, deliver_at timestamptz, content_type text, tenant text, priority integer,
    unique_key text, most text
) returns text
language sql stable
return 'outbox.emit: ' || coalesce('event ' || nullif(current_setting('outbox.event_index', true), '') || ': ', '') || case
    when type is null or length(type) not between 1 and 255 then
        format('type must be 1 to 255 visible ASCII characters without space and "*"; this one has %s',
               coalesce(length(type)::text || ' characters', 'no value'))
    when type collate "C" ~ '[^\x21-\x29\x2b-\x7e]' then
        format('type must be 1 to 255 visible ASCII characters without space and "*"; %s',
               outbox_internal.shown(type, '[^\x21-\x29\x2b-\x7e]'))
    when type ^@ 'outbox.' then
        format('type %s is reserved: types that begin with "outbox." are the relay''s own', type)
    when payload is null then
        'payload must not be null'
    when most is not null and (length(most) > 9 or most collate "C" ~ '[^0-9]') then
        'the setting outbox.max_payload_bytes must be a number of bytes, below 1000000000'
    when octet_length(payload) > outbox_internal.payload_ceiling() then
        format('payload must have at most %s bytes (the ceiling: see outbox-relay migrate --max-payload-bytes); '
               'this one has %s', outbox_internal.payload_ceiling(), octet_length(payload))
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
               outbox_internal.shown(content_type, '[^\x20-\x7e]'))
    when lower(content_type) = 'application/x-erased' then
        'content_type application/x-erased stands for erased events, and no other event has it'
    when deliver_at not between '0001-01-01 00:00:00+00' and '9998-12-31 23:59:59.999999+00' then
        format('deliver_at must be in the years 1 to 9998 (UTC); this one is %s', deliver_at)
    when octet_length(tenant) not between 1 and 255 then
        format('tenant must have 1 to 255 bytes; this one has %s', octet_length(tenant))
    when priority not between -32768 and 32767 then
        format('priority must be a number from -32768 to 32767; this one is %s', priority)
    when octet_length(unique_key) not between 1 and 255 then
        format('unique_key must have 1 to 255 bytes; this one has %s', octet_length(unique_key))
    when headers is not null then
        outbox_internal.header_fault(headers)
end;

-- True if a row was there when the action began, and has not failed since: what is retried and dies again is left.
-- Times ahead of the clock are those of a clock that went back. A discard follows a row through its attempts.
create or replace function outbox_internal.was_before(d outbox.delivery, began timestamptz, discards boolean) returns boolean
language sql volatile
return (d.since < began or d.since > clock_timestamp())
   and (d.last_attempt_at is null or d.last_attempt_at < began or d.last_attempt_at > clock_timestamp()
        or (discards and d.state <> 'dead'));

-- True if a row has been dead since before a time.
create or replace function outbox_internal.died_before(d outbox.delivery, cutoff timestamptz) returns boolean
language sql volatile
return d.state = 'dead'
   and greatest(d.since, d.last_attempt_at, case when d.due_at <= clock_timestamp() then d.due_at end) < cutoff;

-- True if one of the patterns matches an event type: "*" is any number of characters, of types that are not reserved.
create or replace function outbox_internal.type_matches(patterns text[], event_type text) returns boolean
language sql immutable
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
    select coalesce(bool_or(event_type collate "C"
                            like replace(regexp_replace(p collate "C", '([\\%_])', '\\\1', 'g'), '*', '%')
                            and (not event_type ^@ 'outbox.' or p ^@ 'outbox.')), false)
      from unnest(patterns) p
$$;

-- True if a row is one that a filter means; those of replays, whose names begin with "~", are not. One expression, which takes
-- the place of its call when a statement is planned. With `as_of` they are those that were in the queue, and in the state that
-- they are in, at that time; times ahead of the clock are those of a clock that went back. A row that is still to be delivered
-- and has failed since was there, but had not its present error. An error is searched for its kind only if it begins as the
-- kind does. ASCII characters are searched for without the rules of a language, which take most of the time among a million
-- long errors.
create or replace function outbox_internal.is_meant(d outbox.delivery, f outbox.delivery_filter) returns boolean
language sql stable
return case when f.sink is null then d.sink < '~' else d.sink = f.sink end
   and d.state = any (f.states)
   and (f.type_like is null or d.type like f.type_like)
   and (f.key is null or d.key = f.key)
   and (f.status is null or d.last_status = f.status)
   and (f.since is null or d.created_at >= f.since)
   and (f.until is null or d.created_at < f.until)
   and (f.uids is null or d.uid = any (f.uids))
   and (f.as_of is null or (d.since < f.as_of or d.since > statement_timestamp()) and (
        d.last_attempt_at is null or d.last_attempt_at < f.as_of or d.last_attempt_at > statement_timestamp()
        or (d.state <> 'dead' and f.status is null and f.error is null and f.kind is null)))
   and (f.error is null
        or case when octet_length(f.error) = length(f.error) then strpos(lower(d.last_error collate "C"), f.error)
                else strpos(lower(d.last_error), f.error) end > 0)
   and (f.kind is null
        or (d.last_status is null and starts_with(coalesce(d.last_error, ''), substring(f.kind from '^[^N…]*'))
            and outbox_internal.error_kind(d.last_error) = f.kind))
   and (f.tenant is null or d.tenant = f.tenant);

-- Read a time, not in the future, that was given as `name`: ISO 8601 with its zone, or an age before `at` as ISO 8601 duration
-- (PT7200S). An age that reaches back before the year 1 is the beginning of that year.
create or replace function outbox_internal.past_time(name text, value jsonb, at timestamptz) returns timestamptz
language plpgsql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set standard_conforming_strings = on
set datestyle = 'ISO, YMD'
set intervalstyle = 'postgres'
as $$
declare
    given constant text collate "C" := case when jsonb_typeof(value) = 'string' then value #>> '{}' end;
    is_age constant boolean := given ~ '^P(?=.*[0-9])[0-9.YMWDTHS]{1,60}$';
    found timestamptz;
begin
    begin
        if is_age then
            found := outbox_internal.loadable_time(at - given::interval);
        elsif given ~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:.]{1,60} ?(Z|[+-][0-9]{2}(:?[0-9]{2}){0,2})$' then
            found := given::timestamptz;
        end if;
    exception
        when datetime_field_overflow or interval_field_overflow then
            found := case when is_age then outbox_internal.loadable_time('-infinity') end;
        when data_exception then
            null;  -- no such time
    end;
    if found is null or found <> outbox_internal.loadable_time(found) then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('%s must be a time with its zone in the years 1 to 9998, such as 2026-11-23T08:00:00Z, or an age, '
                             'such as PT7200S (in a command 2h): %s', name, coalesce(left(value::text, 60), 'null'));
    end if;
    if found > at then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('%s lies in the future: it is %s, and the database''s clock says %s', name, found, at);
    end if;
    return found;
end
$$;

-- A time that every client can load: the nearest one in the years 1 to 9998.
create or replace function outbox_internal.loadable_time(value timestamptz) returns timestamptz
language sql immutable
return case when value is not null then greatest(least(value, '9998-12-31 00:00:00+00'), '0001-01-02 00:00:00+00') end;

-- Seconds for people: at least 0, with milliseconds.
create or replace function outbox_internal.in_seconds(duration interval) returns double precision
language sql immutable
return case when duration is not null then round(greatest(extract(epoch from duration), 0), 3)::double precision end;

-- The partition that begins at a day.
create or replace function outbox_internal.part_of(day date) returns regclass
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select p.part from outbox_internal.partitions() p where p.day = part_of.day
$$;

-- The identifier of this cluster; null where the server does not tell it. Asked with the owner's rights. Whatever the
-- server says instead of an answer, the log is served without one.
create or replace function outbox_internal.home() returns bigint
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    return (select c.system_identifier from pg_control_system() c);
exception when others then
    return null;
end
$$;

-- True if the transaction numbers of the log, or those of the positions of a sink, are another cluster's. Only data that is
-- moved into a schema of this cluster brings the latter. A cluster that is not known is not another one.
create or replace function outbox_internal.elsewhere() returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select coalesce(m.system_identifier <> c.here, false)
           or exists (select from outbox.sink k where k.home <> c.here)
      from outbox.meta m
     cross join (select outbox_internal.home() as here offset 0) c
$$;

-- Refuse while the log's transaction numbers are not this server's: see outbox_internal.tick.
create or replace function outbox_internal.at_home() returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if outbox_internal.elsewhere() then
        raise exception 'the log comes from another cluster, as after a restore, a move or pg_upgrade: '
            'stop every relay, then run outbox-relay rebase' using errcode = 'OR002';
    end if;
end
$$;

-- The beginning of a text that has at most `most` bytes, cut between characters.
create or replace function outbox_internal.short_text(said text, most_bytes integer) returns text
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    said := left(said, most_bytes);
    while octet_length(said) > most_bytes loop
        said := left(said, -1);
    end loop;
    return said;
end
$$;

-- Raises the counter of the configuration and returns it. It is above every generation, also above one that was written
-- by hand. A change holds its row until the end of the transaction, so two changes never see the same value.
create or replace function outbox_internal.raise_config() returns bigint
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

-- True if an event is one that a replay means: the same condition for reading, counting and previews. One expression,
-- which takes the place of its call when a statement is planned. Reserved types are meant only if the sink has them.
create or replace function outbox_internal.replay_means(
    id bigint, xid xid8, shard smallint, type text, key text, content_type text, created_at timestamptz,
    type_like text, routed text[], wanted_key text, since timestamptz, until timestamptz, floor bigint,
    a_seqs bigint[], a_snapshots pg_snapshot[], a_nexts bigint[], b_snapshots pg_snapshot[], last_ids bigint[]
) returns boolean
language sql stable
return (type_like is null or type like type_like)
   and (routed is null or type like any (routed))
   and (type not like 'outbox.%' or 'outbox.%' = any (routed))
   and (wanted_key is null or key = wanted_key)
   and (since is null or created_at >= since)
   and (until is null or created_at < until)
   and content_type is distinct from 'application/x-erased'
   and outbox_internal.position_passed(id, xid, a_seqs[shard + 1], a_snapshots[shard + 1], a_nexts[shard + 1], b_snapshots[shard + 1],
                              last_ids[shard + 1], floor);

-- The identity of this server: it changes when it was restarted or recovered from the crash of a backend, and every other
-- server that reads the same data has another one. Its body takes the place of every call.
create or replace function outbox_internal.incarnation() returns text
language sql stable
return concat_ws('/', extract(epoch from pg_postmaster_start_time()), pg_sequence_last_value('outbox.server_mark'));

-- True if the destination of a sink is known to be down: then nothing is settled, whatever those who try it die of, and
-- neither a shard's crashes nor a row's claims are counted. What is known is said again at least every minute.
-- Of a replay, it is the destination of its target.
create or replace function outbox_internal.known_down(sink_name text) returns boolean
language sql stable
return exists (
    select from outbox.sink k
     where k.name = outbox_internal.sink_of(sink_name) and k.circuit <> 'closed'
       and k.last_error_at > clock_timestamp() - interval '90 seconds'
);

-- A value that is recorded without being shown: equal values have equal hashes in this database, and in no other.
create or replace function outbox_internal.keyed_hash(value text) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select 'hash:' || left(encode(sha256(h.hash_key || sha256(h.hash_key || convert_to(value, 'UTF8'))), 'hex'), 32)
      from outbox.secret h
$$;

-- Begin an action that takes locks. Raise in a transaction that does not see what is committed before it has them, and let the
-- server end a session that leaves the rest of the transaction idle for 5 seconds: its locks stop the relays.
create or replace function outbox_internal.begin_action(called text) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using errcode = 'invalid_transaction_state',
            message = format('%s must see what is committed before it has its locks', called),
            hint = 'Run it in a transaction that is READ COMMITTED.';
    end if;
    if (select s.setting::integer from pg_settings s where s.name = 'idle_in_transaction_session_timeout')
       not between 1 and 5000 then
        perform set_config('idle_in_transaction_session_timeout', '5s', true);
    end if;
end
$$;

-- Keep no statistics of columns of a table and its partitions: they hold values, also of rows that are gone, which an
-- erasure could not reach. ANALYZE collects none from now on, and those that there are go, by giving the
-- column its own type: PostgreSQL refuses that while a view or the like depends on the column, and would build an index on
-- it again, so no column has one.
create or replace function outbox_internal.keep_no_statistics(of_table regclass, columns text[]) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    c record;
begin
    for c in
        select a.attname as name, format_type(a.atttypid, a.atttypmod)
               || case when a.attcollation <> 0 then ' collate ' || a.attcollation::regcollation::text else '' end as type
          from pg_attribute a
         where a.attrelid = of_table and a.attname = any (columns)
    loop
        execute format('alter table %s alter column %I set statistics 0', of_table, c.name);
        continue when not exists (
            select from pg_stats s
             where s.schemaname = 'outbox' and s.attname = c.name
               and format('%I.%I', s.schemaname, s.tablename)::regclass in (
                    select of_table union all select i.inhrelid::regclass from pg_inherits i where i.inhparent = of_table));
        begin
            execute format('alter table %s alter column %I type %s', of_table, c.name, c.type);
        exception when feature_not_supported then
            raise notice 'statistics of column % of % are kept, because another object depends on it: they hold values',
                c.name, of_table;
        end;
    end loop;
end
$$;
