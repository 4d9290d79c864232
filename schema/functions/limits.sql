-- The time by which a scheduled event is due later in a sink than it was emitted for: a part of the sink's spread_seconds that
-- the uid determines, in whole milliseconds.
create or replace function outbox_internal.spread_of(sink_name text, uid uuid) returns interval
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select coalesce((
        select (('x' || substr(encode(sha256(uuid_send(uid)), 'hex'), 1, 8))::bit(32)::bigint
                % greatest((k.spread_seconds * 1000)::bigint, 1)) * interval '1 millisecond'
          from outbox.sink k where k.name = sink_name and k.spread_seconds is not null), interval '0')
$$;

