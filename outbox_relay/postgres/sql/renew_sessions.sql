-- Renew the sessions of this relay, and return the shards that it owns, with their epochs.
select r.sink, r.shard, r.epoch
  from outbox_internal.renew_sessions(%(owner)s::uuid, %(sinks)s::text[], %(lease)s::double precision) r
