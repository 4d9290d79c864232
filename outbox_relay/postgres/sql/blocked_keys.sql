-- The keys of these shards with rows that are to be delivered in order. Dead rows may be very many: with `hold`, one row
-- of nulls says that the sink has some, and means all of their keys. One statement, since a dead row that is retried
-- between two would be in neither answer.
select b.key, min(b.shard)::smallint as shard
  from (select d.key, d.shard from outbox.delivery d
         where d.sink = %(sink)s and d.ordered and d.state <> 'dead' and d.shard = any (%(shards)s::smallint[])
        union all
        select null, null
         where %(hold)s::boolean
           and exists (select from outbox.delivery d where d.sink = %(sink)s and d.ordered and d.state = 'dead')) b
 where outbox_internal.only_at(%(server)s::text)
 group by b.key
