-- Number of events of the log that a sink has not settled, and since when the `oldest` of them waits. Events with a row in
-- `delivery` are left out; with `above` and `upto`, so are those with other ids. It reads payloads to count the bytes of what
-- it reads, which roles that may see `status` cannot.
--
-- Exact while there are no more than `most`. Beyond that, or after `most_seconds` of looking for events among ids of
-- other sinks, reading stops and `events` is estimated: of each piece of the rest, by how dense the events were in the
-- ids that were read. Every piece is begun, for the sake of `oldest`.
create or replace function outbox_internal.backlog(
    sink_name text, types text[], most integer, most_seconds double precision,
    above bigint default null, upto bigint default null,
    out events bigint, out exact boolean, out oldest timestamptz
)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
#variable_conflict use_column
declare
    everything constant pg_snapshot := '9223372036854775807:9223372036854775807:';
    no_limit constant bigint := 9223372036854775807;
    span constant bigint := 500000;
    until constant timestamptz := clock_timestamp() + least(greatest(coalesce(most_seconds, 5), 0), 60) * interval '1 second';
    newest constant bigint := (select s.last_value from outbox.event_id_seq s);
    piece record;
    chunk record;
    done_id bigint;
    last_id bigint;
    rows integer;
    due bigint;
begin
    most := least(greatest(coalesce(most, 10000), 0), 100000);
    events := 0;
    exact := true;
    for piece in
        select u.late, u.shards, u.a, u.a_next, greatest(u.after_id, above) as after_id,
               least(u.upto_id, newest, upto) as upto_id
          from outbox_internal.unsettled(sink_name) u where u.after_id < newest order by u.after_id
    loop
        due := 0;
        done_id := piece.after_id;
        while done_id < piece.upto_id loop
            last_id := case when piece.late then piece.upto_id else least(piece.upto_id, done_id + span) end;
            rows := case when events > most then 100 when piece.late then most + 1 else least(most + 1, 2000) end;
            select count(*) as read, max(r.id) as last_id, count(*) filter (where r.due) as due,
                   min(r.created_at) filter (where r.due) as oldest
              into chunk
              from (
                select e.id, e.created_at,
                       not exists (select from outbox.delivery d where d.sink = sink_name and d.id = e.id) as due
                  from (
                    select l.id, l.created_at
                      from outbox_internal.read_late(piece.shards, types, piece.a, piece.a_next, everything,
                                            done_id, last_id, rows, no_limit) l
                     where piece.late
                    union all
                    select l.id, l.created_at
                      from outbox_internal.read_rest(piece.shards, types, piece.a, everything,
                                            done_id, last_id, rows, no_limit) l
                     where not piece.late
                  ) e
              ) r;
            due := due + chunk.due;
            oldest := least(oldest, chunk.oldest);
            done_id := case when chunk.read < rows then last_id else chunk.last_id end;
            if done_id < piece.upto_id and (events + due > most or clock_timestamp() > until) then
                exact := false;
                if not piece.late then
                    due := due * (piece.upto_id - piece.after_id) / (done_id - piece.after_id);
                end if;
                exit;
            end if;
        end loop;
        events := events + due;
    end loop;
end
$$;

-- The rows of a sink by state, at most `most` of each, and the age of the oldest event among those that were counted.
create or replace function outbox_internal.figures_of_rows(sink_name text, most integer) returns table (
    state text, rows bigint, oldest double precision
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
#variable_conflict use_column
declare
    bounded constant integer := least(greatest(coalesce(most, 10000), 0), 100000);
begin
    return query
    select r.state, count(*),
           coalesce(greatest(extract(epoch from clock_timestamp() - outbox_internal.loadable_time(min(r.since))), 0), 0)
               ::double precision
      from (
        (select 'waiting' as state, greatest(d.created_at, d.deliver_at) as since
           from outbox.delivery d where d.sink = sink_name and d.state = 'waiting'
          order by d.due_at, d.id limit bounded)
        union all
        (select 'held', d.created_at from outbox.delivery d where d.sink = sink_name and d.state = 'held'
          order by d.key limit bounded)
        union all
        (select 'dead', d.created_at from outbox.delivery d where d.sink = sink_name and d.state = 'dead'
          order by d.id limit bounded)
      ) r
     group by r.state;
end
$$;

-- The state of every sink, and the age of the first event of the log, of any type, that its slowest position has not
-- passed; 0 if there is none.
create or replace function outbox_internal.figures_of_sinks() returns table (
    sink text, patterns text[], paused boolean, unowned integer, position_lag double precision
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
begin
    return query
    with place as materialized (
        select s.sink, min(case when s.b_seq is null then s.a_seq else greatest(s.a_seq, s.last_id) end) as id
          from outbox.standing s where s.sink < '~' collate "C" group by s.sink
    )
    select k.name, k.patterns, k.paused,
           64 - (select count(*) from outbox.owned o where o.sink = k.name)::integer,
           coalesce(greatest(extract(epoch from clock_timestamp() - outbox_internal.loadable_time(e.created_at)), 0), 0)
               ::double precision
      from outbox.sink k
      left join place p on p.sink = k.name
      left join lateral (
        select l.created_at from outbox.event l where l.id > p.id order by l.id limit 1
      ) e on true
     order by k.name
     limit 1000;
end
$$;

-- Return the lag of a sink, in seconds: the age of the first event behind its hindmost position, or of the oldest of the
-- thousand waiting rows that are due next, since it became due if its time was spread; 0 if there is none.
--
-- Positions of idle shards are brought forward every few seconds, so a sink that is served is behind by as much as its
-- delivery is. While few events fail they become rows, and the position moves on.
create or replace function outbox_internal.sink_lag(sink_name text) returns double precision
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
declare
    most constant integer := 1000;
    place constant bigint := (
        select min(case when s.b_seq is null then s.a_seq else greatest(s.a_seq, s.last_id) end)
          from outbox.standing s where s.sink = sink_name);
    unread constant timestamptz := (select e.created_at from outbox.event e where e.id > place order by e.id limit 1);
    parked constant timestamptz := (
        select min(greatest(r.created_at, r.deliver_at))
          from (select d.created_at, d.deliver_at from outbox.delivery d
                 where d.sink = sink_name and d.state = 'waiting'
                 order by d.due_at, d.id limit most) r
         where r.deliver_at is null or r.deliver_at <= now());
begin
    return coalesce(greatest(extract(epoch from clock_timestamp() - outbox_internal.loadable_time(least(unread, parked))), 0), 0);
end
$$;
