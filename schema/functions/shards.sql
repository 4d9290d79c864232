-- Renew the leases of these shards that this owner has at these epochs, and return the seconds until each ends. While leases last
-- longer than `lease_for` (at most 600) seconds, those are left alone of which half, and a third of `lease_for`, is left.
--
-- A relay believes in `lease_for` seconds at most. So a renewal that takes effect late, after its relay has given up the wait,
-- may make a lease shorter: it still lasts for longer than the relay believes.
create or replace function outbox_internal.renew_shards(
    owner_id uuid, sinks text[], shards smallint[], epochs bigint[], lease_for double precision
) returns table (sink text, shard smallint, epoch bigint, lease_seconds double precision)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_nestloop = off
set enable_mergejoin = off
set jit = off
as $$
#variable_conflict use_column
declare
    names constant text[] := array(select distinct n.name from unnest(sinks) n (name));
    second constant interval := '1 second';
    seconds constant double precision := least(greatest(coalesce(lease_for, 0), 0), 600);
    term constant double precision := outbox_internal.lease_term(seconds);
    since constant timestamptz := now() - seconds * second;
    -- Between these a lease is not renewed. Longer ones were written while the clock was ahead.
    enough constant timestamptz := now() + (term / 2 + seconds / 3) * second;
    longest constant timestamptz := now() + greatest(seconds, 60) * second;
    found_rows integer;
begin
    return query
    with held as materialized (
        select c.sink, c.shard, c.epoch, c.lease_until, term > seconds and c.lease_until between enough and longest as stays
          from outbox.shard c
          join unnest(sinks, shards, epochs) k (sink, shard, epoch)
            on k.sink = (c.sink || '') and k.shard = c.shard and k.epoch = c.epoch
         where (c.sink || '') = any (names) and c.lease_until > since and c.owner = owner_id
    ),
    due as materialized (
        select c.sink, c.shard, c.epoch
          from outbox.shard c
          join held h on h.sink = (c.sink || '') and h.shard = c.shard and not h.stays
         where (c.sink || '') = any (names) and c.lease_until > since and c.owner = owner_id
         order by (c.sink || ''), c.shard
           for no key update of c
    ),
    renewed as (
        update outbox.shard s
           set lease_until = clock_timestamp() + term * second
          from held h
          join due d on d.sink = h.sink and d.shard = h.shard and d.epoch = h.epoch
         where (s.sink || '') = any (names) and s.lease_until > since and (s.sink || '') = d.sink and s.shard = d.shard
        returning s.sink, s.shard, s.epoch, s.lease_until
    )
    select h.sink, h.shard, h.epoch,
           extract(epoch from coalesce(r.lease_until, h.lease_until) - clock_timestamp())::double precision
      from held h
      left join renewed r on r.sink = h.sink and r.shard = h.shard and r.epoch = h.epoch
     where h.stays or r.sink is not null;
    get diagnostics found_rows = row_count;
    if found_rows >= cardinality(sinks) or term > seconds then
        return;
    end if;
    -- Those that ended long ago, such as all of them after the clock was set forward. This passes by all versions: while there
    -- are many, such leases are lost, or one that is lost would delay the renewal of all others.
    return query
    with lapsed as materialized (
        select c.sink, c.shard, c.epoch
          from outbox.shard c
         where (c.sink || '') = any (names) and c.lease_until <= since and c.owner = owner_id
         order by (c.sink || ''), c.shard
           for no key update of c
    )
    update outbox.shard s
       set lease_until = clock_timestamp() + seconds * second
      from unnest(sinks, shards, epochs) k (sink, shard, epoch)
      join lapsed l on l.sink = k.sink and l.shard = k.shard and l.epoch = k.epoch
     where (s.sink || '') = any (names) and s.lease_until <= since and (s.sink || '') = l.sink and s.shard = l.shard
    returning s.sink, s.shard, s.epoch, seconds;
end
$$;

-- The duration of leases, in seconds: what is asked for or, while there are many versions that VACUUM has not removed, up to 60.
-- Each renewal adds one for each shard, and a new entry of the primary key passes by all of that shard. The number of versions is
-- asked for only if the table is large.
create or replace function outbox_internal.lease_term(lease_for double precision) returns double precision
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select case when pg_relation_size('outbox.shard') < 16777216 then lease_for
                else greatest(lease_for,
                              least(60, lease_for * pg_stat_get_dead_tuples('outbox.shard'::regclass)
                                        / greatest(200000, 20 * pg_stat_get_live_tuples('outbox.shard'::regclass))))
           end
$$;

-- The number of the shards of a sink whose lease has not ended.
create or replace function outbox_internal.leased_shards(sink_name text) returns integer
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
begin
    return (select count(*) from outbox.shard s where (s.sink || '') = sink_name and s.lease_until > now());
end
$$;

-- The positions of these shards of a sink.
create or replace function outbox_internal.positions(sink_name text, of_shards smallint[]) returns table (
    shard smallint, a_seq bigint, a_snapshot text, a_next bigint, b_seq bigint, b_snapshot text, b_next bigint, last_id bigint
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
#variable_conflict use_column
begin
    return query
    select p.shard, p.a_seq, p.a_snapshot::text, p.a_next, p.b_seq, p.b_snapshot::text, p.b_next, p.last_id
      from outbox.standing p
     where p.sink = sink_name and p.shard = any (of_shards);
end
$$;

-- Number of events of a sink that are rows to be delivered, counted up to `most` of those with a place in the
-- order of a key and of those without. Events that waited for their part of spread_seconds are left out. And, if asked for
-- `trouble`, whether one came back without an attempt being counted, as those do that wait for a part of the destination; no
-- more than `most` of those that are about to be due are looked at.
create or replace function outbox_internal.rows_standing(
    sink_name text, most integer, trouble boolean, out standing bigint, out waiting boolean
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
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
