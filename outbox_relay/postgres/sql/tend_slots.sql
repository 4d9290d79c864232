-- Say how many slots of a sink this relay wants, and return how many it has.
select slots, quota
  from outbox_internal.tend_slots(%(sink)s::text, %(relay)s::uuid, %(call)s::bigint, %(wanted)s::integer, %(kept)s::integer,
                         %(lease)s::double precision)
