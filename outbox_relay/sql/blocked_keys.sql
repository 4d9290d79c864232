-- The keys of these shards with rows that take part in their order.
select d.key, min(d.shard)::smallint as shard
  from outbox.delivery d
 where d.sink = %(sink)s and d.ordered and d.shard = any (%(shards)s::smallint[])
   and (d.state <> 'dead' or %(hold)s::boolean)
   and outbox.only_at(%(server)s::text)
 group by d.key
