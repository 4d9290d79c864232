-- For each sink, the number of live relays that serve it, and the number of them with an id below this relay's.
select k.sink, count(r.id)::integer as relays, (count(r.id) filter (where r.id < %(id)s::uuid))::integer as before
  from unnest(%(sinks)s::text[]) k (sink)
  left join outbox.relay r
    on k.sink = any (r.sinks) and r.seen_at > clock_timestamp() - %(lease)s::double precision * interval '1 second'
 group by k.sink
