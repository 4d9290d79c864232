-- Settlements of delivered rows cost less. Relays made for version 2 work on this schema.

-- Records attempts as in version 4, but looks up the sink once, and not for each attempt: that was half of the cost of
-- settling a row that was retried.
create or replace function outbox.record_attempts(
    sink text, relay text, ids bigint[], uids uuid[], numbers integer[], outcomes text[], ages double precision[],
    milliseconds double precision[], statuses integer[], errors text[], details text[]
) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    target constant text := outbox.sink_of(record_attempts.sink);
    recorded bigint;
begin
    insert into outbox.attempt (at, uid, sink, id, number, relay, outcome, status, milliseconds, error, detail)
    select clock_timestamp() - r.age * interval '1 second', r.uid, target, r.id, r.number,
           record_attempts.relay, r.outcome, r.status, r.took, r.error,
           outbox.attempt_detail(record_attempts.sink, r.detail::jsonb)
      from unnest(ids, uids, numbers, outcomes, ages, record_attempts.milliseconds, statuses, errors, details)
           r (id, uid, number, outcome, age, took, status, error, detail);
    get diagnostics recorded = row_count;
    return recorded;
end
$$;

-- Those of `keys` that have a row to be delivered in order, each by one look into the index delivery_key. It is volatile, so
-- that a settlement that calls it does not count the rows that it has deleted, and sees those that were written meanwhile.
create function outbox.keys_with_rows(sink_name text, keys text[]) returns table (key text)
language plpgsql volatile rows 10
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
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
