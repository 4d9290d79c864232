-- The rest of a window: a range of ids above the sequence value of A.
select id, shard, uid, type, key, payload, content_type, headers, deliver_at, created_at, fault, tenant
  from outbox_internal.read_rest(%(shards)s::smallint[], %(types)s::text[], %(a)s::pg_snapshot, %(b)s::pg_snapshot,
                        %(after)s::bigint, %(upto)s::bigint, %(rows)s::integer, %(bytes)s::bigint,
                        %(most_payload)s::bigint)
 where outbox_internal.only_at(%(server)s::text)
