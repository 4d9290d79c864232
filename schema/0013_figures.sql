-- Figures of the database that one relay measures for all, and a history of each minute. Relays made for version 2 work on
-- this schema: they measure and write nothing of it.

-- ---------------------------------------------------------------------------------------------------------
-- Figures
-- ---------------------------------------------------------------------------------------------------------

-- One row. `token` belongs to the newest claim: no other process can guess it. Only functions write here.
create table outbox.figures (
    single boolean primary key default true check (single),
    owner uuid,
    token uuid,
    lease_until timestamptz not null default '-infinity',
    at timestamptz,
    figures jsonb
) with (fillfactor = 50);
insert into outbox.figures default values;

-- Claims the measuring of figures for `seconds`; the token is null while another relay has it. A lease that ends later
-- than any claim allows comes from a clock that was set back, and counts as lapsed.
create function outbox.claim_figures(relay uuid, seconds double precision, out token uuid, out now double precision)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    most constant interval := '60 seconds';
    length constant interval := least(greatest(coalesce(seconds, 15), 1), 60) * interval '1 second';
    claimed uuid;
begin
    perform set_config('synchronous_commit', 'off', true);
    insert into outbox.figures default values on conflict do nothing;
    update outbox.figures f
       set owner = claim_figures.relay, token = gen_random_uuid(), lease_until = clock_timestamp() + length
     where f.owner is not distinct from claim_figures.relay or f.lease_until <= clock_timestamp()
        or f.lease_until > clock_timestamp() + most
    returning f.token into claimed;
    claim_figures.token := claimed;
    claim_figures.now := extract(epoch from clock_timestamp());
end
$$;

-- Stores figures under the token of a claim that has not lapsed; false if there is none.
create function outbox.store_figures(relay uuid, token uuid, figures jsonb) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
begin
    perform set_config('synchronous_commit', 'off', true);
    if octet_length(figures::text) > 4194304 then
        raise exception using errcode = 'program_limit_exceeded', message = 'figures must have at most 4 MiB';
    end if;
    update outbox.figures f set at = clock_timestamp(), figures = store_figures.figures
     where f.owner = relay and f.token = store_figures.token and f.lease_until > clock_timestamp();
    return found;
end
$$;

-- The state of every sink, and the age of the first event of the log, of any type, that its slowest position has not
-- passed; 0 if there is none.
create function outbox.figures_of_sinks() returns table (
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
    ),
    unowned as materialized (
        select h.sink, count(*)::integer as shards from outbox.shard h
         where h.lease_until <= clock_timestamp() group by h.sink
    )
    select k.name, k.patterns, k.paused, coalesce(u.shards, 0),
           coalesce(greatest(extract(epoch from clock_timestamp() - outbox.loadable_time(e.created_at)), 0), 0)
               ::double precision
      from outbox.sink k
      left join place p on p.sink = k.name
      left join unowned u on u.sink = k.name
      left join lateral (
        select l.created_at from outbox.event l where l.id > p.id order by l.id limit 1
      ) e on true
     order by k.name
     limit 1000;
end
$$;

-- The rows of a sink by state, at most `most` of each, and the age of the oldest event among those that were counted.
create function outbox.figures_of_rows(sink_name text, most integer) returns table (
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
           coalesce(greatest(extract(epoch from clock_timestamp() - outbox.loadable_time(min(r.since))), 0), 0)
               ::double precision
      from (
        (select case when d.deliver_at > now() then 'scheduled' else 'waiting' end as state,
                case when d.deliver_at > now() then d.created_at else greatest(d.created_at, d.deliver_at) end as since
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

-- ---------------------------------------------------------------------------------------------------------
-- History
-- ---------------------------------------------------------------------------------------------------------

-- The work of relays in each minute of the database's clock: counts of all relays, and the greatest of their percentiles, in
-- seconds. The sink '' is the process itself. `busy_ms` is the time that statements of the data path took together.
create table outbox.history (
    sink text not null collate "C",
    at timestamptz not null,
    delivered bigint not null default 0,
    failed bigint not null default 0,
    dead bigint not null default 0,
    backlog bigint,
    oldest_seconds double precision,
    end_to_end_p50 double precision,
    end_to_end_p99 double precision,
    claim_p99 double precision,
    tick_p99 double precision,
    settle_p99 double precision,
    busy_ms double precision,
    primary key (sink, at)
) with (fillfactor = 70);
create index history_at on outbox.history (at);

-- Adds the rows of one relay to the present minute. Rows of unknown sinks are left out.
create function outbox.add_history(minute jsonb) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    written integer;
begin
    perform set_config('synchronous_commit', 'off', true);
    insert into outbox.history as h (sink, at, delivered, failed, dead, backlog, oldest_seconds, end_to_end_p50,
                                     end_to_end_p99, claim_p99, tick_p99, settle_p99, busy_ms)
    select r.sink, date_trunc('minute', clock_timestamp()), greatest(coalesce(r.delivered, 0), 0),
           greatest(coalesce(r.failed, 0), 0), greatest(coalesce(r.dead, 0), 0), r.backlog, r.oldest_seconds,
           r.end_to_end_p50, r.end_to_end_p99, r.claim_p99, r.tick_p99, r.settle_p99, r.busy_ms
      from (
        select distinct on (j.sink) j.*
          from jsonb_to_recordset(minute) j (
               sink text, delivered bigint, failed bigint, dead bigint, backlog bigint, oldest_seconds double precision,
               end_to_end_p50 double precision, end_to_end_p99 double precision, claim_p99 double precision,
               tick_p99 double precision, settle_p99 double precision, busy_ms double precision)
         where j.sink = '' or exists (select from outbox.sink k where k.name = j.sink)
         order by j.sink
      ) r
     order by r.sink
        on conflict (sink, at) do update
       set delivered = h.delivered + excluded.delivered, failed = h.failed + excluded.failed,
           dead = h.dead + excluded.dead,
           backlog = coalesce(excluded.backlog, h.backlog),
           oldest_seconds = coalesce(excluded.oldest_seconds, h.oldest_seconds),
           end_to_end_p50 = greatest(h.end_to_end_p50, excluded.end_to_end_p50),
           end_to_end_p99 = greatest(h.end_to_end_p99, excluded.end_to_end_p99),
           claim_p99 = greatest(h.claim_p99, excluded.claim_p99),
           tick_p99 = greatest(h.tick_p99, excluded.tick_p99),
           settle_p99 = greatest(h.settle_p99, excluded.settle_p99),
           busy_ms = coalesce(h.busy_ms, 0) + coalesce(excluded.busy_ms, 0);
    get diagnostics written = row_count;
    return written;
end
$$;

-- Removes minutes that are older than two days, at most `most`; returns their number.
create function outbox.trim_history(most integer) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    removed bigint;
begin
    delete from outbox.history h
     using (
        select o.sink, o.at from outbox.history o where o.at < clock_timestamp() - interval '2 days'
         order by o.at limit least(greatest(coalesce(most, 1000), 0), 10000) for update skip locked
     ) old
     where h.sink = old.sink and h.at = old.at;
    get diagnostics removed = row_count;
    return removed;
end
$$;

-- A removed sink has no history, and a renamed one keeps it: outbox.follow_rename comes before the old name is deleted.
create function outbox.history_deleted() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    delete from outbox.history h where h.sink = any (array(select r.name from removed r));
    return null;
end
$$;

create trigger history_deleted after delete on outbox.sink
referencing old table as removed
for each statement execute function outbox.history_deleted();

-- Gives the minutes of one name to another, which may have some of its own.
create function outbox.move_history(old_name text, new_name text) returns void
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    with moved as (
        delete from outbox.history h where h.sink = old_name returning h.*
    )
    insert into outbox.history as h
    select (jsonb_populate_record(null::outbox.history, to_jsonb(m) || jsonb_build_object('sink', new_name))).*
      from moved m order by m.at
        on conflict (sink, at) do update
       set delivered = h.delivered + excluded.delivered, failed = h.failed + excluded.failed,
           dead = h.dead + excluded.dead,
           end_to_end_p50 = greatest(h.end_to_end_p50, excluded.end_to_end_p50),
           end_to_end_p99 = greatest(h.end_to_end_p99, excluded.end_to_end_p99),
           claim_p99 = greatest(h.claim_p99, excluded.claim_p99),
           settle_p99 = greatest(h.settle_p99, excluded.settle_p99),
           busy_ms = coalesce(h.busy_ms, 0) + coalesce(excluded.busy_ms, 0)
$$;

-- Move replays, the times of notices and the history from a sink to its new name.
create or replace function outbox.follow_rename(old_name text, new_name text) returns void
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    update outbox.replay r
       set sink = case when r.sink = old_name then new_name else r.sink end,
           target = case when r.target = old_name then new_name else r.target end
     where old_name in (r.sink, r.target);
    delete from outbox.notice n where n.sink = new_name;
    update outbox.notice n set sink = new_name where n.sink = old_name;
    select outbox.move_history(old_name, new_name);
$$;
