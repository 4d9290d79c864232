-- Renew the sessions of a relay, at most 600 seconds from now, and return the shards that it owns, with their epochs. What it
-- believes in and is not returned is lost.
--
-- The shards are read by a later snapshot: a claim that found the session ended has locked it, so this has waited for it. A
-- session that was not there is begun, and has no shards yet: a claim that saw none may be under way.
create or replace function outbox_internal.renew_sessions(owner_id uuid, sinks text[], lease_for double precision)
    returns table (sink text, shard smallint, epoch bigint)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    term constant interval := least(greatest(coalesce(lease_for, 0), 0), 600) * interval '1 second';
    renewed text[];
begin
    with kept as (
        update outbox.session n set lease_until = clock_timestamp() + term
         where n.sink = any (sinks) and n.owner = owner_id
        returning n.sink
    )
    select array_agg(k.sink) into renewed from kept k;
    insert into outbox.session (sink, owner, lease_until)
    select w.sink, owner_id, clock_timestamp() + term
      from unnest(sinks) w (sink)
     where w.sink <> all (coalesce(renewed, '{}'))
       and (w.sink >= '~' or exists (select from outbox.sink k where k.name = w.sink))
        on conflict do nothing;
    return query
    select s.sink, s.shard, s.epoch from outbox.shard s where s.sink = any (renewed) and s.owner = owner_id;
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
