-- Claim rows that are due, in the order of their keys.
select id, shard, uid, type, key, payload, content_type, headers, deliver_at, created_at, fault, tenant, ordered, attempts, claims,
       lease, tried, due
  from outbox_internal.claim_rows(%(sink)s::text, %(owner)s::uuid, %(lease)s::uuid, %(lease_for)s::double precision,
                         %(rows)s::integer, %(bytes)s::bigint, %(hold)s::boolean, %(keys)s::text[],
                         %(suspects)s::boolean, %(with_followers)s::boolean, %(most_payload)s::bigint,
                         %(after_due)s::double precision, %(after_id)s::bigint)
 order by id
