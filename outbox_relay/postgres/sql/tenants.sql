-- The tenants of these events, if they have one and are in the log. Each is a look into the index of the partition of its day.
select r.id, e.tenant
  from unnest(%(ids)s::bigint[], %(shards)s::smallint[], %(uids)s::uuid[], %(times)s::timestamptz[])
       r (id, shard, uid, created_at)
 cross join lateral (
    select l.uid, l.tenant from outbox.event l
     where l.id = r.id and l.shard = r.shard and l.created_at = r.created_at
     limit 1
 ) e
 where e.uid = r.uid and e.tenant is not null
