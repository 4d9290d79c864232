-- The rest of a window, as far as its events are small.
select id, shard, uid, type, key, payload, content_type, headers, deliver_at, created_at, fault, tenant
  from outbox_internal.read_rest(%(shards)s::smallint[], %(types)s::text[], %(a)s::pg_snapshot, %(b)s::pg_snapshot,
                        %(after)s::bigint, %(upto)s::bigint, %(rows)s::integer, null, %(most_payload)s::bigint,
                        %(bytes)s::integer)
 where outbox_internal.only_at(%(server)s::text)
