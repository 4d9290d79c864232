-- The latecomers of a window.
select id, shard, uid, type, key, payload, content_type, headers, deliver_at, created_at, fault, tenant
  from outbox_internal.read_late(%(shards)s::smallint[], %(types)s::text[], %(a)s::pg_snapshot, %(a_next)s::bigint,
                        %(b)s::pg_snapshot, %(after)s::bigint, %(upto)s::bigint, %(rows)s::integer, %(bytes)s::bigint,
                        %(most_payload)s::bigint)
 where outbox_internal.only_at(%(server)s::text)
