-- The next events of a replay.
select id, shard, uid, type, key, payload, content_type, headers, deliver_at, created_at, fault
  from outbox.read_replay(%(replay)s::bigint, %(shards)s::smallint[], %(after)s::bigint, %(upto)s::bigint,
                          %(rows)s::integer, %(bytes)s::bigint, %(most_payload)s::bigint)
 where outbox.only_at(%(server)s::text)
