-- Claim rows of the queue of a sink with claim = "rows", by priority or by turns of tenants.
select id, shard, uid, type, key, payload, content_type, headers, deliver_at, created_at, fault, tenant, ordered, attempts, claims,
       lease, tried, null::double precision as due, place, walk_end
  from outbox_internal.claim_queued(%(sink)s::text, %(owner)s::uuid, %(lease)s::uuid, %(lease_for)s::double precision,
                           %(rows)s::integer, %(bytes)s::bigint, %(most_payload)s::bigint, %(fair)s::boolean,
                           %(after)s::text)
 order by place
