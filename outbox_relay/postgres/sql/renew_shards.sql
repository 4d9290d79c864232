-- Renew the leases of this relay at the epochs that it knows, and return the seconds that are left of each. A lease that is not
-- returned is lost.
select r.sink, r.shard, r.epoch, r.lease_seconds
  from outbox_internal.renew_shards(%(owner)s::uuid, %(sinks)s::text[], %(shards)s::smallint[], %(epochs)s::bigint[],
                           %(lease)s::double precision) r
