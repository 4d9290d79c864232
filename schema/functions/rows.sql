-- Claim rows of a sink that are due: waiting ones, the first ones of `keys`, and with `with_followers` rows behind those of the
-- same key; or with `suspects` one row that may have killed its owners. A row with a place in the order of its key is claimed
-- if no earlier one of the key is left.
create or replace function outbox_internal.claim_rows(
    sink_name text, owner_id uuid, lease_id uuid, lease_for double precision, most_rows integer, most_bytes bigint,
    hold boolean, keys text[], suspects boolean, with_followers boolean, most_payload bigint default null,
    after_due double precision default null, after_id bigint default null
) returns setof outbox_internal.claimed_row
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    ceiling constant bigint := least(most_payload, outbox_internal.payload_ceiling());
    after_time constant timestamptz := to_timestamp(after_due);
    waiting bigint[];
    held bigint[];
    behind bigint[] := '{}';
    chosen bigint[];
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
                    and not (hold and coalesce(outbox_internal.first_dead(sink_name, d.key) < d.id, false))))
             order by d.due_at, d.id
             limit 1
               for update skip locked
        );
    else
        waiting := array(
            select d.id from outbox.delivery d
             where d.sink = sink_name and d.state = 'waiting' and d.due_at <= now()
               and (d.due_at, d.id) > (coalesce(after_time, '-infinity'), coalesce(after_id, 0))
               and (d.lease_until is null or d.lease_until <= now()) and not d.suspect
               and (not d.ordered or (
                    not exists (
                        select from outbox.delivery f
                         where f.sink = sink_name and f.key = d.key and f.id < d.id and f.ordered and f.state <> 'dead')
                    and not (hold and coalesce(outbox_internal.first_dead(sink_name, d.key) < d.id, false))))
             order by d.due_at, d.id
             limit most_rows
               for update skip locked
        );
        held := array(
            select h.id from unnest(keys) k (key)
             cross join lateral (
                select d.id, d.state, d.due_at, d.lease_until, d.suspect from outbox.delivery d
                 where d.sink = sink_name and d.key = k.key and d.ordered and d.state <> 'dead'
                 order by d.id limit 1
             ) h
             where h.state = 'held' and h.due_at <= now()
               and (h.lease_until is null or h.lease_until <= now()) and not h.suspect
               and not (hold and coalesce(outbox_internal.first_dead(sink_name, k.key) < h.id, false))
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
                           outbox_internal.bytes_of(case when octet_length(d.payload) <= ceiling then d.payload end, d.key,
                                                    d.headers::text) as bytes
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
                    select l.key, l.ordered, array_agg(l.id) as ids,
                           case when hold and l.ordered then outbox_internal.first_dead(sink_name, l.key) end as dead
                      from outbox.delivery l
                     where l.sink = sink_name and l.id = any (chosen) group by l.key, l.ordered
                ) c
                 left join lateral (
                    select f.id from outbox.delivery f
                     where f.sink = sink_name and f.key = c.key and f.ordered and f.state <> 'dead'
                       and f.id <> all (c.ids)
                     order by f.id limit 1
                ) other on c.ordered
                 cross join lateral unnest(c.ids) i (id)
                 where (other.id is null or i.id < other.id) and (c.dead is null or i.id < c.dead)
            );
        end if;
    end if;
    return query select * from outbox_internal.take_rows(sink_name, chosen, owner_id, lease_id, lease_for, ceiling, null);
end
$$;

-- Give rows of a sink a lease, and return them, each with its place in `ids`. A claim is counted unless the destination is known
-- to be down. The count stops at the largest integer: the relay that gets such a row makes it dead.
--
-- The places are not joined to the change, since a plan that was made for a row or two would go through the whole sink: a binary
-- search finds each.
create or replace function outbox_internal.take_rows(
    sink_name text, ids bigint[], owner_id uuid, lease_id uuid, lease_for double precision, ceiling bigint, walk_end text
) returns setof outbox_internal.claimed_row
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    first_time constant timestamptz := '0001-01-01 00:00:00+00';
    last_time constant timestamptz := '9999-01-01 00:00:00+00';
    counted constant integer := case when outbox_internal.known_down(sink_name) then 0 else 1 end;
    sorted bigint[];
    places integer[];
begin
    select array_agg(n.id order by n.id), array_agg(n.place::integer order by n.id) into sorted, places
      from unnest(ids) with ordinality n (id, place);
    return query
    update outbox.delivery d
       set owner = owner_id, lease = lease_id, lease_until = clock_timestamp() + lease_for * interval '1 second',
           claims = least(d.claims::bigint + counted, 2147483647)::integer
     where d.sink = sink_name and d.id = any (sorted)
    returning d.id, d.shard, d.uid::text, d.type, d.key,
              case when octet_length(d.payload) <= ceiling
                     and (d.deliver_at is null or d.deliver_at >= first_time and d.deliver_at < last_time)
                   then d.payload end,
              d.content_type, d.headers::text,
              case when d.deliver_at >= first_time and d.deliver_at < last_time then d.deliver_at end,
              greatest(first_time, least(d.created_at, last_time - interval '1 second')),
              outbox_internal.delivery_fault(d.payload, null, null, d.deliver_at, ceiling), d.tenant,
              d.ordered, d.attempts, d.claims, d.lease, d.last_attempt_at is not null,
              extract(epoch from d.due_at)::double precision, places[width_bucket(d.id, sorted)], walk_end;
end
$$;

-- Ends the leases of rows whose delivery ended without an outcome, by a relay that continues: no claim is counted
-- against them. Rows under a lease are due, and none is dead.
create or replace function outbox_internal.give_rows_back(sink_name text, owner_id uuid) returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
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

-- Up to `most` keys (null: all) behind `after_key` (null: from the first one on) that have held rows, in their order.
-- It steps from key to key, so the rows of one key cost no more than one row.
create or replace function outbox_internal.held_keys(sink_name text, after_key text, most integer) returns table (key text)
language plpgsql stable rows 1000
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
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

-- Those of `keys` that have a row to be delivered in order, each by one look into the index delivery_key. It is volatile, so
-- that a settlement that calls it does not count the rows that it has deleted, and sees those that were written meanwhile.
create or replace function outbox_internal.keys_with_rows(sink_name text, keys text[]) returns table (key text)
language plpgsql volatile rows 10
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
#variable_conflict use_column
begin
    return query
    select k.key
      from unnest(keys) k (key)
     where (select true from outbox.delivery d
             where d.sink = sink_name and d.key = k.key and d.ordered and d.state <> 'dead'
             order by d.id limit 1);
end
$$;

-- The id of the first dead row of a key that has a place in its order, or null.
--
-- It asks for a range of keys, in their order, which only the index delivery_dead_key has; the range is the one key.
-- Asked for an equal key, a plan may go through all dead rows of the sink by their ids, which seems to cost no more than
-- that index if the statistics know one key or none: ANALYZE looks at 30,000 rows, and may find none but dead ones.
create or replace function outbox_internal.first_dead(sink_name text, wanted text) returns bigint
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
begin
    return (
        select d.id from outbox.delivery d
         where d.sink = sink_name and d.key >= wanted and d.key <= wanted and d.ordered and d.state = 'dead'
         order by d.key, d.id limit 1
    );
end
$$;

-- `since` of a dead row is when it died, whatever it died of and whichever relay says so: keep_dead_days counts from it. A dead
-- row that is to be delivered again has its place in the queue of its sink.
create or replace function outbox_internal.row_changed() returns trigger
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if new.state = 'dead' then
        new.since := clock_timestamp();
    else
        new.ready := (select true from outbox.sink k where k.name = new.sink and k.claim = 'rows');
    end if;
    return new;
end
$$;
