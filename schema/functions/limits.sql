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

-- The row of a scheduled event has the time at which it is due in its sink, in both columns. With claim = "rows" it is in the
-- queue from this time on. An event that was emitted for its own time, or moved to one before, is not scheduled.
create or replace function outbox_internal.spread_scheduled() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    spread constant interval := outbox_internal.spread_of(new.sink, new.uid);
begin
    if spread > interval '0' and outbox_internal.is_untouched(new)
       and new.deliver_at > new.created_at and new.deliver_at < '9998-01-01 00:00:00+00' then
        new.deliver_at := new.deliver_at + spread;
        new.due_at := greatest(new.due_at, new.deliver_at);
        if new.ready then
            new.ready := new.due_at <= clock_timestamp();
        end if;
    end if;
    return new;
end
$$;
