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

-- Rows that are dead may be as many as there are: only people look at them. So no index that a relay goes through has
-- them, but the one that sinks with when_dead = "hold" ask.
drop index outbox.delivery_key;
create index delivery_key on outbox.delivery (sink, key, id) where ordered and state <> 'dead';
create index delivery_dead_key on outbox.delivery (sink, key, id) where ordered and state = 'dead';
-- A sweep looks at the keys with held rows alone.
create index delivery_held on outbox.delivery (sink, key) where state = 'held';
-- What counts for `parked_max` and has no place in the order of a key: all but events that were scheduled.
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

-- How many events of a sink stand as rows that are to be delivered, counted up to `most` of those with a place in the
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

-- Ends the leases of rows whose delivery ended without an outcome, by a relay that goes on: no claim is counted against
-- them. Rows under a lease are due, and none is dead.
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
    first_time constant timestamptz := '0001-01-02 00:00:00+00';
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
        -- What must wait, or was claimed by another relay since it was looked for, may come before what is locked here.
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
                   when octet_length(d.payload) > ceiling
                   then format('payload has %s bytes, more than the ceiling of %s', octet_length(d.payload), ceiling)
              end;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Ticks and servers
-- ---------------------------------------------------------------------------------------------------------

-- ---------------------------------------------------------------------------------------------------------
-- Sinks, positions and rebase
-- ---------------------------------------------------------------------------------------------------------

-- ---------------------------------------------------------------------------------------------------------
-- Partitions
-- ---------------------------------------------------------------------------------------------------------
