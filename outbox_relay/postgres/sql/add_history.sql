-- Add the work of this relay to the present minute. Rows of unknown sinks are left out.
with added as (
    insert into outbox.history as h (sink, at, delivered, failed, dead, backlog, oldest_seconds, end_to_end_p50,
                                     end_to_end_p99, claim_p99, tick_p99, settle_p99, busy_ms)
    select distinct on (r.sink) r.sink, date_trunc('minute', clock_timestamp()), coalesce(r.delivered, 0), coalesce(r.failed, 0),
           coalesce(r.dead, 0), r.backlog, r.oldest_seconds, r.end_to_end_p50, r.end_to_end_p99, r.claim_p99, r.tick_p99,
           r.settle_p99, r.busy_ms
      from jsonb_to_recordset(%(minute)s::jsonb) r (
           sink text, delivered bigint, failed bigint, dead bigint, backlog bigint, oldest_seconds double precision,
           end_to_end_p50 double precision, end_to_end_p99 double precision, claim_p99 double precision,
           tick_p99 double precision, settle_p99 double precision, busy_ms double precision)
     where r.sink = '' or exists (select from outbox.sink k where k.name = r.sink)
     order by r.sink
        on conflict (sink, at) do update
       set delivered = h.delivered + excluded.delivered, failed = h.failed + excluded.failed, dead = h.dead + excluded.dead,
           backlog = coalesce(excluded.backlog, h.backlog),
           oldest_seconds = coalesce(excluded.oldest_seconds, h.oldest_seconds),
           end_to_end_p50 = greatest(h.end_to_end_p50, excluded.end_to_end_p50),
           end_to_end_p99 = greatest(h.end_to_end_p99, excluded.end_to_end_p99),
           claim_p99 = greatest(h.claim_p99, excluded.claim_p99), tick_p99 = greatest(h.tick_p99, excluded.tick_p99),
           settle_p99 = greatest(h.settle_p99, excluded.settle_p99),
           busy_ms = coalesce(h.busy_ms, 0) + coalesce(excluded.busy_ms, 0)
    returning 1
)
select count(*) from added
