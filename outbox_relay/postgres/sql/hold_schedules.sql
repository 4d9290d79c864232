-- Record which schedules the file of a relay has, as an object of names and of the generations that it knows, and return those
-- that have another generation by now. `held`: another live relay knows this one, so it is in the file of that relay.
with recorded as (
    update outbox.relay r set schedules = %(known)s::jsonb
     where r.id = %(relay)s::uuid and r.schedules is distinct from %(known)s::jsonb
),
other as materialized (
    select s.name, s.generation
      from outbox.schedule s
      join jsonb_each_text(%(known)s::jsonb) k (name, generation) on k.name = s.name
     where k.generation <> s.generation::text
),
held as materialized (
    select e.name, e.generation
      from outbox.relay r
     cross join lateral jsonb_each_text(r.schedules) e (name, generation)
     where r.id <> %(relay)s::uuid and r.seen_at > clock_timestamp() - interval '30 seconds' and exists (select from other)
)
select o.name, o.generation, exists (select from held h where h.name = o.name and h.generation = o.generation::text) as held
  from other o
