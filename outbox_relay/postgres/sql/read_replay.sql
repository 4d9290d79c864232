-- The next events of a replay, with those that it passes by.
select id, shard, uid, type, key, payload, content_type, headers, deliver_at, created_at, fault, tenant
  from outbox_internal.read_replayed(%(replay)s::bigint, %(shards)s::smallint[], %(after)s::bigint, %(upto)s::bigint,
                            %(rows)s::integer, %(bytes)s::bigint, %(most_payload)s::bigint)
 where outbox_internal.only_at(%(server)s::text)
