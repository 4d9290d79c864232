-- Those of these keys that still have rows that take part in their order.
select k.key
  from unnest(%(keys)s::text[]) k (key)
 where (exists (select from outbox.delivery d
                 where d.sink = %(sink)s and d.key = k.key and d.ordered and d.state <> 'dead')
        or (%(hold)s::boolean
            and exists (select from outbox.delivery d
                         where d.sink = %(sink)s and d.key = k.key and d.ordered and d.state = 'dead')))
   and outbox.only_at(%(server)s::text)
