-- Renew leases of this relay at the epochs that it knows, unless they ended long ago: `renew_lapsed_shards` renews those, too.
-- Return the seconds that are left of each.
select r.sink, r.shard, r.epoch, r.lease_seconds
  from outbox.renew_shards(%(owner)s::uuid, %(sinks)s::text[], %(shards)s::smallint[], %(epochs)s::bigint[],
                           %(lease)s::double precision) r
