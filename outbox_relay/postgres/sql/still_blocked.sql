-- Those of these keys that still have rows that take part in their order. Each key is looked up by itself: as EXISTS, the
-- condition could be answered by a hash of all dead rows.
select k.key
  from unnest(%(keys)s::text[]) k (key)
 where (coalesce((select true from outbox.delivery d
                   where d.sink = %(sink)s and d.key = k.key and d.ordered and d.state <> 'dead'
                   order by d.id limit 1), false)
        or (%(hold)s::boolean and outbox_internal.first_dead(%(sink)s, k.key) is not null))
   and outbox_internal.only_at(%(server)s::text)
