-- A replay keeps a day since its start, whether or not a pass has seen it.

-- As in version 8, with the time since which a replay keeps the partition: its start.
create or replace function outbox.replay_keepers(part regclass, before timestamptz) returns jsonb
language plpgsql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
declare
    kept jsonb := '[]';
    r record;
    there boolean;
begin
    for r in
        select p.id, p.state, p.since, p.until, p.ids, p.upto_id, p.created_at,
               (select min(l.last_id)
                  from (select max(u.last_id) as last_id
                          from outbox.replay_progress g cross join lateral unnest(g.shards, g.last_ids) u (shard, last_id)
                         where g.replay = p.id group by u.shard) l) as last_id,
               case when p.counted_upto < p.upto_id then p.counted_upto end as counted_upto
          from outbox.replay p where p.state in ('running', 'paused') order by p.id
    loop
        execute format(
            'select exists (select from %s e where e.id > $1 and e.id <= $2 and e.created_at < $3 '
            '   and ($4 is null or e.created_at >= $4) and ($5 is null or e.created_at < $5) '
            '   and ($6 is null or e.id = any ($6)))', part)
           into there using least(r.last_id, r.counted_upto), r.upto_id, before, r.since, r.until, r.ids;
        if there then
            kept := kept || jsonb_build_object('kind', 'replay', 'name', r.id::text, 'paused', r.state = 'paused',
                                               'since', date_trunc('second', r.created_at));
        end if;
    end loop;
    return kept;
end
$$;

-- As in version 6. A member that has this time already keeps it.
create or replace function outbox.kept_since(kept jsonb, earlier jsonb) returns jsonb
language sql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
    select coalesce(jsonb_agg(
               n.one || jsonb_build_object('since', coalesce(
                   n.one -> 'since',
                   (select o.one -> 'since' from jsonb_array_elements(earlier) o (one)
                     where o.one -> 'kind' = n.one -> 'kind' and o.one -> 'name' = n.one -> 'name' limit 1),
                   to_jsonb(date_trunc('second', clock_timestamp()))))
               order by n.place), '[]')
      from jsonb_array_elements(kept) with ordinality n (one, place)
$$;
