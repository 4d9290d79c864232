-- Every sink that the database knows, and how many of its shards nobody owns now.
select k.name, k.patterns, k.paused, k.circuit, k.last_error,
       (select count(*) from outbox.shard s
         where s.sink = k.name and (s.owner is null or s.lease_until <= now()))::integer as unowned
  from outbox.sink k
 order by k.name
