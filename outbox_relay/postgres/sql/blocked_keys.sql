-- The keys of these shards with rows that take part in their order.
select b.key, min(b.shard)::smallint as shard
  from (select d.key, d.shard from outbox.delivery d
         where d.sink = %(sink)s and d.ordered and d.state <> 'dead' and d.shard = any (%(shards)s::smallint[])
        union all
        select d.key, d.shard from outbox.delivery d
         where %(hold)s::boolean
           and d.sink = %(sink)s and d.ordered and d.state = 'dead' and d.shard = any (%(shards)s::smallint[])) b
 where outbox.only_at(%(server)s::text)
 group by b.key
