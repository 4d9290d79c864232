-- Claim rows of the queue of a sink with claim = "rows", by priority or by turns of tenants. With `tenants`, look up those of
-- the events in the log: the tenant of a row is only whose turn it is, and the last column is where the walk over tenants ended.
select c.id, c.shard, c.uid, c.type, c.key, c.payload, c.content_type, c.headers, c.deliver_at, c.created_at, c.fault,
       case when %(tenants)s::boolean then (
           select case when e.uid::text = c.uid then e.tenant end
             from outbox.event e
            where e.id = c.id and e.shard = c.shard and e.created_at = c.created_at
            limit 1
       ) end as event_tenant,
       c.ordered, c.attempts, c.claims, c.tried, c.place, c.tenant
  from outbox_internal.claim_queued(%(sink)s::text, %(owner)s::uuid, %(lease)s::uuid, %(lease_for)s::double precision,
                           %(rows)s::integer, %(bytes)s::bigint, %(most_payload)s::bigint, %(fair)s::boolean,
                           %(after_tenant)s::text) c
