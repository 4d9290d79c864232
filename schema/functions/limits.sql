-- Take up to `wanted` tokens of a sink's rate, each of them one request, and give `unused` ones back; return how many were
-- taken, and what is left. Tokens of half a second are kept for a burst, and one more: a relay that asks a moment late loses
-- none. Only the clock of this server counts. No row: the sink has no rate.
create or replace function outbox_internal.take_tokens(sink_name text, wanted integer, unused integer)
returns table (taken integer, remaining double precision)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    rate double precision;
    had outbox.sink_limit;
    now_at timestamptz;
begin
    if not exists (select from outbox.sink k where k.name = sink_name and k.rate_per_second is not null)
       or not outbox_internal.lock_limits(sink_name) then
        return;
    end if;
    rate := (select k.rate_per_second from outbox.sink k where k.name = sink_name);
    if rate is null then
        return;
    end if;
    select * into had from outbox.sink_limit l where l.sink = sink_name;
    now_at := clock_timestamp();
    remaining := least(1 + rate / 2, had.tokens + greatest(unused, 0)
                                     + rate * greatest(0, extract(epoch from now_at - had.at)::double precision));
    taken := floor(least(greatest(wanted, 0), remaining));
    remaining := remaining - taken;
    update outbox.sink_limit l
       set tokens = remaining, at = now_at, short_at = case when taken < wanted then now_at else had.short_at end
     where l.sink = sink_name;
    return next;
end
$$;

-- Say how many slots of a sink a relay wants, and return how many it has from now on, and its fair share. It has at least
-- `kept` of those that it had, since these may be in use before it has the answer. All are leased for `lease_for` seconds.
-- The sum over all relays is max_in_flight_total at most, whatever else they want. No row: the sink has no such limit, or a
-- later call of this relay was here before.
create or replace function outbox_internal.tend_slots(
    sink_name text, relay_id uuid, call_number bigint, slots_wanted integer, kept integer, lease_for double precision
) returns table (slots integer, quota integer)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    longest constant double precision := 30 * 86400;
    most_ahead constant interval := interval '10 seconds';
    total integer;
    now_at timestamptz;
    mine outbox.sink_slot;
    had integer;
    others bigint;
begin
    if not exists (select from outbox.sink k where k.name = sink_name and k.max_in_flight_total is not null)
       or not outbox_internal.lock_limits(sink_name) then
        return;
    end if;
    total := (select k.max_in_flight_total from outbox.sink k where k.name = sink_name);
    if total is null then
        return;
    end if;
    now_at := clock_timestamp();
    insert into outbox.sink_slot as s (sink, relay, call, wanted)
    values (sink_name, relay_id, call_number, greatest(slots_wanted, 0))
        on conflict (sink, relay) do update set call = excluded.call, wanted = excluded.wanted, asked_at = now_at,
                                               turn_at = least(s.turn_at, now_at), served_at = least(s.served_at, now_at)
     where s.call < excluded.call
    returning s.* into mine;
    if not found then
        return;
    end if;
    -- If the clock of this server went backwards, each lease begins again now, and turns, too.
    update outbox.sink_slot s
       set lease_until = case when s.lease_until > s.asked_at then now_at + (s.lease_until - s.asked_at)
                              else '-infinity' end,
           asked_at = now_at, turn_at = '-infinity', served_at = '-infinity'
     where s.sink = sink_name and s.relay <> relay_id and s.asked_at > now_at + most_ahead;
    had := least(greatest(kept, 0), case when mine.lease_until > now_at then mine.slots else 0 end);
    others := coalesce((select sum(s.slots) from outbox.sink_slot s
                         where s.sink = sink_name and s.relay <> relay_id and s.lease_until > now_at), 0);
    quota := coalesce((select q.quota from outbox_internal.slot_quotas(sink_name, total, now_at) q where q.relay = relay_id), 0);
    slots := least(greatest(had, quota), had + greatest(total - others - had, 0));
    update outbox.sink_slot s
       set slots = tend_slots.slots, lease_until = now_at + least(greatest(lease_for, 0), longest) * interval '1 second',
           turn_at = case when tend_slots.slots = 0 then '-infinity' when had = 0 then now_at else s.turn_at end,
           served_at = case when tend_slots.slots > 0 or had > 0 then now_at else s.served_at end
     where s.sink = sink_name and s.relay = relay_id;
    return next;
end
$$;

-- The number of slots that each relay is to have that wants some. Each gets one, as far as they go round; the rest goes
-- where more are wanted, evenly. If there are fewer slots than relays, those that have waited longest come first, after those
-- whose turn of half a second is not over.
create or replace function outbox_internal.slot_quotas(sink_name text, total integer, now_at timestamptz)
returns table (relay uuid, quota integer)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    asking record;
    shared integer;
begin
    for asking in
        select a.relay, a.wanted, a.place <= total as has_one,
               greatest(0, total - count(*) over ()) as others,
               count(*) over (order by a.wanted desc, a.relay desc rows between unbounded preceding and current row) as behind
          from (
            select s.relay, s.wanted,
                   row_number() over (order by s.slots > 0 and s.lease_until > now_at
                                               and s.turn_at > now_at - interval '0.5 seconds' desc,
                                               s.served_at, s.relay) as place
              from outbox.sink_slot s
             where s.sink = sink_name and s.wanted > 0 and s.asked_at > now_at - interval '2 seconds'
          ) a
         order by a.wanted, a.relay
    loop
        shared := coalesce(shared, asking.others);
        relay := asking.relay;
        quota := 0;
        if asking.has_one then
            quota := 1 + least(asking.wanted - 1, shared / asking.behind);
            shared := shared - (quota - 1);
        end if;
        return next;
    end loop;
end
$$;

-- A relay that left gives its slots up, but not those that its requests may still use: they are deleted with the next relay
-- that leaves after their lease.
create or replace function outbox_internal.slots_given_up() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    delete from outbox.sink_slot s
     where (s.sink, s.relay) in (
            select l.sink, l.relay from outbox.sink_slot l
             where (l.slots = 0 or l.lease_until <= clock_timestamp())
               and not exists (select from outbox.relay r where r.id = l.relay)
               for update skip locked);
    return null;
end
$$;

-- Record the limits that the file of a relay has for a sink: those of the relay that started or was reloaded last are in force
-- on all. Return null, or why they are refused; those in force then stay. A name that no sink has changes nothing.
create or replace function outbox_internal.state_limits(sink_name text, limits jsonb) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    rate double precision;
    total integer;
    spread double precision;
begin
    begin
        rate := (limits ->> 'rate_per_second')::double precision;
        total := (limits ->> 'max_in_flight_total')::integer;
        spread := (limits ->> 'spread_seconds')::double precision;
    exception when data_exception then
        return format('limits of sink %s must be numbers', quote_literal(sink_name));
    end;
    if not rate between 0.01 and 100000 then
        return format('rate_per_second of sink %s must be 0.01 to 100000', quote_literal(sink_name));
    elsif not total between 1 and 100000 then
        return format('max_in_flight_total of sink %s must be 1 to 100000', quote_literal(sink_name));
    elsif not (spread > 0 and spread <= 86400) then
        return format('spread_seconds of sink %s must be above 0, up to 86400', quote_literal(sink_name));
    elsif jsonb_typeof(limits) is distinct from 'object' then
        return format('limits of sink %s must be an object', quote_literal(sink_name));
    end if;
    update outbox.sink k
       set rate_per_second = rate, max_in_flight_total = total, spread_seconds = spread
     where k.name = sink_name
       and (k.rate_per_second, k.max_in_flight_total, k.spread_seconds) is distinct from (rate, total, spread);
    return null;
end
$$;

-- Lock the row of a sink's limits until the end of the transaction, and make it first if there is none. Return false, without
-- a row, if no sink has the name. A sink is renamed or removed only before or after that: such a transaction deletes the sink,
-- and then this row. The limits of the sink must be read afterwards, since they may have changed while this waited.
create or replace function outbox_internal.lock_limits(sink_name text) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    perform from outbox.sink_limit l where l.sink = sink_name for update;
    if not found then
        insert into outbox.sink_limit (sink)
        select k.name from outbox.sink k where k.name = sink_name for key share
            on conflict do nothing;
        perform from outbox.sink_limit l where l.sink = sink_name for update;
    end if;
    return found;
end
$$;

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

-- Slots follow a sink that is renamed, and go with one that is removed.
create or replace function outbox_internal.move_limits() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    delete from outbox.sink_limit l where l.sink = new.name;
    if new.renamed_to is not null then
        delete from outbox.sink_slot s where s.sink = new.renamed_to;
        update outbox.sink_slot s set sink = new.renamed_to where s.sink = new.name;
    end if;
    delete from outbox.sink_slot s where s.sink = new.name;
    return null;
end
$$;

