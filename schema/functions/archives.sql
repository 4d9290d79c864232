-- Record that an archive of a day is about to be written to this address, before its first byte is, and forget the archives
-- whose objects were `removed`. One that was begun before can be removed.
create or replace function outbox_internal.begin_archive(day date, lease bigint, address text, removed text[] default '{}')
returns void
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    select outbox_internal.renew_retention(lease);
    update outbox.day d
       set writing_to = address,
           unfinished = array(select u from unnest(outbox_internal.with_archive(d.unfinished, nullif(d.writing_to, address))) u
                               where u <> all (removed))
     where d.day = begin_archive.day and d.emptied_at is null;
$$;

-- The next events of a checked day in the order of ids and uids, those that the check saw: at most `most_rows`, and no more
-- than `most_bytes` of payload but for the last one. `key_hash` is how manifests list a key.
create or replace function outbox_internal.read_day_events(
    day date, lease bigint, after_id bigint, after_uid uuid, most_rows integer, most_bytes bigint
) returns table (
    id bigint, xid text, shard smallint, uid text, type text, key text, content_type text, headers text,
    deliver_at text, created_at text, emitter text, tenant text, priority smallint, payload bytea, key_hash text
)
language plpgsql stable security definer rows 1000
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_variable
declare
    c constant outbox.day := outbox_internal.checked_day(day, lease);
    part constant regclass := outbox_internal.part_of(day);
begin
    most_rows := least(greatest(coalesce(most_rows, 1000), 1), 10000);
    most_bytes := least(greatest(coalesce(most_bytes, 8388608), 1), 268435456);
    return query execute format(
        'select w.id, w.xid::text, w.shard, w.uid::text, w.type, w.key, coalesce(w.content_type, ''application/json''), w.headers::text, '
        '       w.deliver_at::text, w.created_at::text, pg_get_userbyid(w.emitter)::text, w.tenant, w.priority, w.payload, '
        '       outbox_internal.keyed_hash(w.key) '
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

-- Record a verified archive, the one that was begun: it holds every event that the newest check saw. An older one can be
-- removed.
create or replace function outbox_internal.record_archive(day date, lease bigint, address text, hash text, events bigint) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
begin
    perform outbox_internal.renew_retention(lease);
    update outbox.day d
       set archived_to = address, sha256 = hash, events = record_archive.events, writing_to = null,
           unfinished = outbox_internal.with_archive(d.unfinished, nullif(d.archived_to, address)),
           archived_snapshot = d.checked_snapshot, archived_before = d.checked_before, archived_on = d.checked_on
     where d.day = record_archive.day and d.emptied_at is null and d.checked_snapshot is not null
       and d.writing_to = address;
    if not found then
        raise exception 'day % has no check that the archive could belong to, or no archive % was begun', day, address
            using errcode = 'object_not_in_prerequisite_state';
    end if;
end
$$;

-- The archives of a day that is not emptied that were begun or superseded, and whose objects can be removed. Nothing is
-- recorded of them under an older lease than the caller's.
create or replace function outbox_internal.unfinished_archives(day date, lease bigint) returns text[]
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    select outbox_internal.renew_retention(lease);
    select array_remove(d.unfinished || d.writing_to, null) from outbox.day d
     where d.day = unfinished_archives.day and d.emptied_at is null;
$$;

-- The archives that may hold what was erased: superseded ones, and those of days that were emptied. An event that is in the
-- log is in none of the latter; a uid that the database made is in those around its day.
create or replace function outbox_internal.archives_of_subject(in_log boolean, uid uuid) returns jsonb
language sql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
    select coalesce(jsonb_agg(a.address order by a.address), '[]')
      from (
        select u.address from outbox.day d, unnest(d.unfinished || d.writing_to) u (address) where u.address is not null
        union
        (select d.archived_to
           from outbox.day d
          cross join (select case when get_byte(uuid_send(uid), 6) >> 4 = 7
                                  then to_timestamp(('x' || encode(substring(uuid_send(uid) from 1 for 6), 'hex'))::bit(48)::bigint
                                                    / 1000.0)::date end) m (made_on)
          where d.archived_to is not null and d.emptied_at is not null and (uid is null or not in_log)
            and (m.made_on is null or d.day = '-infinity' or d.day between m.made_on - 32 and m.made_on + 1)
          order by d.emptied_at desc limit 1000)
      ) a (address)
$$;

-- `names` with a name of an archive whose objects can be removed, unless it is null: at most the newest hundred.
create or replace function outbox_internal.with_archive(names text[], name text) returns text[]
language sql immutable
return case when name is null then names
            else (array_remove(names, name) || name)[greatest(cardinality(array_remove(names, name)) - 98, 1):] end;
