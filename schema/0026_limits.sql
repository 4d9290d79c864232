-- Limits of a sink across all relays: requests per second, requests in flight, and the spread of scheduled events. Relays of
-- earlier versions work on this schema as before: they know no limit of requests.

do $$
declare
    tries constant integer := 10;
    patience constant integer := (select s.setting::integer from pg_settings s where s.name = 'deadlock_timeout');
    lock_timeout_before constant text := current_setting('lock_timeout');
begin
    for attempt in 1..tries loop
        begin
            perform set_config('lock_timeout', greatest(patience / 2, 1)::text, true);
            lock table outbox.sink in access exclusive mode;
            perform set_config('lock_timeout', greatest(patience / 20, 1)::text, true);
            lock table outbox.delivery, outbox.relay, outbox.former_sink in share row exclusive mode;
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

-- ---------------------------------------------------------------------------------------------------------
-- The limits
-- ---------------------------------------------------------------------------------------------------------

alter table outbox.sink
    add column rate_per_second double precision,
    add column max_in_flight_total integer,
    add column spread_seconds double precision;
alter table outbox.sink
    add constraint sink_rate_per_second_check check (rate_per_second between 0.01 and 100000) not valid,
    add constraint sink_max_in_flight_total_check check (max_in_flight_total between 1 and 100000) not valid,
    add constraint sink_spread_seconds_check check (spread_seconds > 0 and spread_seconds <= 86400) not valid;
alter table outbox.sink
    validate constraint sink_rate_per_second_check,
    validate constraint sink_max_in_flight_total_check,
    validate constraint sink_spread_seconds_check;
comment on column outbox.sink.rate_per_second is 'Events per second of all relays together; null: no limit.';
comment on column outbox.sink.max_in_flight_total is 'Requests in flight of all relays together; null: no limit.';
comment on column outbox.sink.spread_seconds is 'Time over which scheduled events of one moment are spread; null: none.';

-- The requests that the rate of a sink leaves. Relays that take slots lock the row too, so that one at a time counts.
create table outbox.sink_limit (
    sink text collate "C" primary key,
    tokens double precision not null default 0,
    at timestamptz not null default clock_timestamp(),
    short_at timestamptz
) with (fillfactor = 20, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
comment on table outbox.sink_limit is 'The requests that the rate of each sink leaves to the relays.';
comment on column outbox.sink_limit.tokens is 'Requests that could be sent at once, at the time `at`.';
comment on column outbox.sink_limit.short_at is 'When a relay last got fewer than it wanted.';

-- The slots of each relay: a request in flight has one. They are leased, for longer than a request lasts.
create table outbox.sink_slot (
    sink text collate "C" not null,
    relay uuid not null,
    call bigint not null,
    wanted integer not null,
    slots integer not null default 0,
    lease_until timestamptz not null default '-infinity',
    asked_at timestamptz not null default clock_timestamp(),
    turn_at timestamptz not null default '-infinity',
    served_at timestamptz not null default '-infinity',
    primary key (sink, relay)
) with (fillfactor = 20, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
comment on table outbox.sink_slot is 'How many requests each relay may have in flight to a sink with max_in_flight_total.';
comment on column outbox.sink_slot.call is 'The number of the newest call of the relay: one that arrives later has no effect.';
comment on column outbox.sink_slot.turn_at is 'Since when the relay has had a slot.';
comment on column outbox.sink_slot.served_at is 'When the relay was last seen with a slot.';

-- Record the limits that the file of a relay has for a sink: those of the relay that started or was reloaded last are in force
-- on all. Return null, or why they are refused; those in force then stay. A name that no sink has changes nothing.
create function outbox.state_limits(sink_name text, limits jsonb) returns text
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
create function outbox.lock_limits(sink_name text) returns boolean
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

-- Slots follow a sink that is renamed, and go with one that is removed.
create function outbox.move_limits() returns trigger
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
create trigger move_limits after insert or update of removed_at on outbox.former_sink
    for each row execute function outbox.move_limits();

-- A relay that left gives its slots up, but not those that its requests may still use: they are deleted with the next relay
-- that leaves after their lease.
create function outbox.slots_given_up() returns trigger
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
create trigger slots_given_up after delete on outbox.relay
    for each row execute function outbox.slots_given_up();

-- ---------------------------------------------------------------------------------------------------------
-- The rate
-- ---------------------------------------------------------------------------------------------------------

-- Take up to `wanted` tokens of a sink's rate, each of them one request, and give `unused` ones back; return how many were
-- taken, and what is left. Tokens of half a second are kept for a burst, and one more: a relay that asks a moment late loses
-- none. Only the clock of this server counts. No row: the sink has no rate.
create function outbox.take_tokens(sink_name text, wanted integer, unused integer)
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
       or not outbox.lock_limits(sink_name) then
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

-- ---------------------------------------------------------------------------------------------------------
-- Slots
-- ---------------------------------------------------------------------------------------------------------

-- The number of slots that each relay is to have that wants some. Each gets one, as far as they go round; the rest goes
-- where more are wanted, evenly. If there are fewer slots than relays, those that have waited longest come first, after those
-- whose turn of half a second is not over.
create function outbox.slot_quotas(sink_name text, total integer, now_at timestamptz)
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

-- Say how many slots of a sink a relay wants, and return how many it has from now on, and its fair share. It has at least
-- `kept` of those that it had, since these may be in use before it has the answer. All are leased for `lease_for` seconds.
-- The sum over all relays is max_in_flight_total at most, whatever else they want. No row: the sink has no such limit, or a
-- later call of this relay was here before.
create function outbox.tend_slots(
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
       or not outbox.lock_limits(sink_name) then
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
    quota := coalesce((select q.quota from outbox.slot_quotas(sink_name, total, now_at) q where q.relay = relay_id), 0);
    slots := least(greatest(had, quota), had + greatest(total - others - had, 0));
    update outbox.sink_slot s
       set slots = tend_slots.slots, lease_until = now_at + least(greatest(lease_for, 0), longest) * interval '1 second',
           turn_at = case when tend_slots.slots = 0 then '-infinity' when had = 0 then now_at else s.turn_at end,
           served_at = case when tend_slots.slots > 0 or had > 0 then now_at else s.served_at end
     where s.sink = sink_name and s.relay = relay_id;
    return next;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Scheduled events of one moment
-- ---------------------------------------------------------------------------------------------------------

-- The time by which a scheduled event is due later in a sink than it was emitted for: a part of the sink's spread_seconds that
-- the uid determines, in whole milliseconds.
create function outbox.spread_of(sink_name text, uid uuid) returns interval
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
create function outbox.spread_scheduled() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    spread constant interval := outbox.spread_of(new.sink, new.uid);
begin
    if spread > interval '0' and outbox.is_untouched(new)
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
create trigger spread_scheduled before insert or update of deliver_at on outbox.delivery
    for each row when (new.deliver_at is not null and new.sink < '~') execute function outbox.spread_scheduled();

-- As in version 21, and a moved row may be claimed only once it is due in its sink.
create or replace function outbox.take_scheduled(sink_name text, wanted bigint[]) returns bigint[]
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
    most constant integer := 100;  -- of the locks that the whole server has room for
    tried constant bigint[] := array(
        select d.id from outbox.delivery d where d.sink = sink_name and d.id = any (wanted) order by d.due_at, d.id limit most);
    free bigint[];
    uids uuid[];
    changed bigint[];
    times timestamptz[];
begin
    select array_agg(l.id), array_agg(l.uid) into free, uids
      from (select d.id, d.uid from outbox.delivery d
             where d.sink = sink_name and d.id = any (tried) and pg_try_advisory_xact_lock(outbox.uid_lock(d.uid))) l;
    free := coalesce(free, '{}');
    if cardinality(free) < cardinality(tried) then
        update outbox.delivery d set due_at = clock_timestamp() + interval '1 second'
         where d.sink = sink_name and d.id = any (tried) and d.id <> all (free);
    end if;
    -- With the locks, and so after the commit of every change that was made under them. Two steps: a plan made while there
    -- was no change would go through all of them for each row.
    select array_agg(d.id), array_agg(c.deliver_at) into changed, times
      from (select s.uid, s.created_at, s.deliver_at from outbox.scheduled_change s where s.uid = any (uids) offset 0) c
      join outbox.delivery d on d.sink = sink_name and d.id = any (free) and d.uid = c.uid
                                and (d.created_at = c.created_at) is true;
    if changed is null then
        return free;
    end if;
    update outbox.delivery d set due_at = n.deliver_at, deliver_at = n.deliver_at
      from unnest(changed, times) n (id, deliver_at)
     where d.sink = sink_name and d.id = n.id and n.deliver_at is not null;
    perform outbox.drop_cancelled(array_agg(n.id), array_agg(sink_name))
       from unnest(changed, times) n (id, deliver_at) where n.deliver_at is null
     having count(*) > 0;
    return array(select d.id from outbox.delivery d
                  where d.sink = sink_name and d.id = any (free) and d.due_at <= clock_timestamp());
end
$$;

-- As in version 21, and a scheduled event that no sink has read yet is shown with the spread of the sink.
create or replace function outbox.event_states(wanted uuid) returns table (sink text, state text, details jsonb)
language sql stable security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
    select s.sink, case when s.mended then 'settled' else s.state end,
           case when s.mended then '{}' else s.details end
           || case when s.delivered and s.details ? 'again' then jsonb_build_object('again', true) else '{}' end
           || case when s.replays is null then '{}' else jsonb_build_object('replays', s.replays) end
      from (
        select p.sink,
               case when p.state not in ('pending', 'scheduled') then p.state
                    when c.uid is not null and c.deliver_at is null then 'discarded'
                    when t.due > now() then 'scheduled'
                    else p.state end as state,
               case when p.state not in ('pending', 'scheduled') then p.details
                    when c.uid is not null and c.deliver_at is null
                    then jsonb_build_object('at', c.changed_at, 'by', null, 'role', c.emitter, 'reason', 'cancelled')
                    when t.due is null or t.due <= now() and c.uid is null then p.details
                    else p.details || jsonb_build_object('due_in_seconds',
                                                         outbox.in_seconds(outbox.loadable_time(t.due) - now())) end
                   as details,
               r.replays, r.delivered,
               coalesce(r.settled, false)
                   and (p.state in ('not routed', 'passed over')
                        or p.state = 'unknown' and p.details ->> 'reason' <> 'rebase needed') as mended
          from outbox.passage_states(wanted) p
          left join outbox.replay_outcomes(wanted) r on r.sink = p.sink
          left join (
            select l.created_at, l.deliver_at from outbox.event l where l.uid = wanted order by l.id + 0 desc limit 1
          ) e on true
          left join outbox.scheduled_change c on c.uid = wanted and c.created_at = e.created_at
         cross join lateral (
            -- A row has its own time, unless a change is to be carried out on it.
            select case when c.uid is not null or not p.details ? 'attempts' and e.deliver_at > e.created_at
                        then coalesce(c.deliver_at, e.deliver_at) end as at
         ) o
         cross join lateral (
            select case when o.at > e.created_at and o.at < '9998-01-01 00:00:00+00'
                        then o.at + outbox.spread_of(p.sink, wanted) else o.at end as due
         ) t
      ) s
$$;
